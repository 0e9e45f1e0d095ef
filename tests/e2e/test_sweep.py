"""A seeded tenth of torch's op database: values, and errors; `opinfo.py` runs all the values."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lenz.api import compile_graph
from lenz.options import Options
from tests.e2e.opinfo import DTYPES, MODES, keys
from tests.e2e.sweep import cases, fresh, name_of, sweep, tensors_of

# Equal parts of the tenth, so that workers share it.
PARTS = 10
SEED = 2


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed, which pytest prints with what a failing test has captured."""
    given = request.config.getoption("--sweep-seed", default=None)
    chosen = SEED if given is None else int(given)
    print(f"--sweep-seed {chosen}")
    return chosen


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No warnings, of which bad inputs and old ops give many."""
    pytest.importorskip("expecttest", reason="torch's op database needs it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("part", range(PARTS))
def test_a_tenth_of_all_ops_agrees_with_eager(part: int, seed: int) -> None:
    every = sorted(keys([], DTYPES, MODES))
    chosen = random.Random(seed).sample(every, len(every) // 10)[part::PARTS]
    ops = {name_of(op): op for op in cases()}
    rows = [
        sweep(ops[name], getattr(torch, dtype), 1, mode == "dynamic", first=seed + k)
        for k, (name, dtype, mode) in enumerate(chosen)
    ]
    bad = [str(r) for r in rows if r.failures]
    assert not bad, "\n".join(bad)
    assert sum(r.passed > 0 for r in rows) > len(rows) * 0.8


# Of these, rows with NaN or infinities were other ones than in eager.
LOST_NAN = (
    "cdist", "nn.functional.pdist", "mode", "grid_sampler_3d", "special.zeta",
    "polygamma.polygamma_n_2", "special.chebyshev_polynomial_t",
)  # fmt: skip


@pytest.mark.parametrize("part", range(2))
def test_special_values_are_those_of_eager(part: int, seed: int) -> None:
    """NaN, infinities and zeros of both signs; `make special` takes all ops."""
    ops = {name_of(op): op for op in cases() if torch.float32 in op.supported_dtypes("cpu")}
    chosen = [*LOST_NAN, *random.Random(seed).sample(sorted(ops), len(ops) // 20)][part::2]
    rows = [sweep(ops[name], torch.float32, 2, first=seed + k, special=True)
            for k, name in enumerate(chosen)]  # fmt: skip
    bad = [str(r) for r in rows if r.failures]
    assert not bad, "\n".join(bad)
    assert sum(r.passed > 0 for r in rows) > len(rows) * 0.7


def test_what_eager_refuses_is_refused(request: pytest.FixtureRequest, seed: int) -> None:
    """Bad inputs raise eager's error, or aot_eager's, and leave the arguments as eager does."""
    ops = [op for op in cases() if op.error_inputs_func is not None]
    if not request.config.getoption("--all-ops", default=False):
        ops = random.Random(seed).sample(ops, len(ops) // 10)
    found = [f"{name_of(op)}: {what}" for op in ops for what in refusals(op)]
    assert not found, "\n".join(found)


def refusals(op: Any) -> Iterator[str]:
    """What is wrong with how the op refuses each of its bad inputs."""
    for k, bad in enumerate(op.error_inputs("cpu")):
        s = bad.sample_input

        def fn(first: Any, args: Any, kwargs: Any) -> Any:
            return op.op(first, *args, **kwargs)

        given = (s.input, s.args, s.kwargs)
        wanted, left = refused(fn, given)
        if wanted is None:
            continue  # some are bad on other devices only
        got, ours = refused(torch.compile(fn, backend=compiled, fullgraph=True), given)
        if got is None:
            if refused(torch.compile(fn, backend="aot_eager", fullgraph=True), given)[0]:
                yield f"{k}: no error, but in eager {type(wanted).__name__}: {wanted}"
        elif not isinstance(got, type(wanted)):
            theirs, _ = refused(torch.compile(fn, backend="aot_eager", fullgraph=True), given)
            if not isinstance(got, type(theirs)):
                yield f"{k}: {type(got).__name__} ({got}) and not {type(wanted).__name__}"
        elif not all(map(alike, ours, left)):
            yield f"{k}: arguments that eager leaves alone were written"


def refused(fn: Callable[..., Any], given: Any) -> tuple[Exception | None, list[torch.Tensor]]:
    """The error of a call, if it raises, and its arguments as it leaves them."""
    torch._dynamo.reset()
    args = torch.utils._pytree.tree_map(fresh, given)
    try:
        fn(*args)
    except Exception as e:  # noqa: BLE001  # whatever is raised is compared
        return e, tensors_of(args)
    return None, tensors_of(args)


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in all bits that mean something."""
    if a.layout is not torch.strided or a.is_meta:
        return True
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def compiled(gm: Any, inputs: Any) -> Callable[..., Any]:
    """The backend."""
    return compile_graph(gm, inputs, Options.from_environment({}))
