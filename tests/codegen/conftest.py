"""For which machines the tests of this folder compile, and how many kernels they take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-kernels", action="store_true", help="Triton kernels: all, and not only a sample"
    )


@pytest.fixture
def all_kernels(request: pytest.FixtureRequest) -> bool:
    """True when tests of Triton kernels should take all of what they usually take a sample of."""
    return bool(request.config.getoption("--all-kernels", default=False))


@pytest.fixture(params=["host", "avx2"])
def target(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile the kernels of the test for this machine and for older ones that it can run."""
    yield from _compile_for(request.param)


@pytest.fixture
def oldest() -> Iterator[None]:
    """Compile the kernels of the test for an x86 without AVX and without fp16 conversions."""
    yield from _compile_for("sse2")


def _compile_for(name: str) -> Iterator[None]:
    from tests.codegen import codegen_run

    found = codegen_run.targets().get(name)
    if found is None:
        pytest.skip(f"no {name} here")
    codegen_run.current.append(found)
    yield
    codegen_run.current.pop()
