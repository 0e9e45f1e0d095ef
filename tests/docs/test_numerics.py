"""docs/numerics.md: the table is of today's functions, and what it says of their errors is true."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch

from tests.docs.blocks import REPOSITORY

DOCS = REPOSITORY / "docs"


def measurer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_numerics", DOCS / "numerics.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


NUMERICS = measurer()
ROWS = {
    cells[1].strip("` "): [c.strip() for c in cells[2:-1]]
    for line in (DOCS / "numerics.md").read_text().partition(NUMERICS.START)[2].splitlines()
    if (cells := line.split("|"))[1:] and cells[1].strip().startswith("`")
}


def test_the_table_has_a_row_for_every_function_with_an_error() -> None:
    assert list(ROWS) == [op.name for op in NUMERICS.functions()], "run python docs/numerics.py"
    for op in NUMERICS.functions():
        assert ROWS[op.name][-2:] == [f"{op.ulp:g}", f"{op.form('cuda').ulp or op.ulp:g}"]
        assert float(ROWS[op.name][3].split(",")[0]) <= op.ulp


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_functions_of_half_types_round_once_at_every_value(dtype: torch.dtype) -> None:
    far = {op.name: e for op, e, _ in NUMERICS.measured(dtype, 1 << 16) if e > 0.505}
    assert not far, "errors in ulp"


@pytest.mark.one_in(1)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_functions_are_as_near_as_the_table_says(dtype: torch.dtype) -> None:
    column, count = (3, 1 << 17) if dtype is torch.float32 else (4, 200)
    for op, error, _ in NUMERICS.measured(dtype, count):
        said = float(ROWS[op.name][column].split(",")[0])
        # Functions of f64 are those of the C library, which differ a little from one to the next.
        least = 0.51 if dtype is torch.float32 else 1.0
        assert error <= max(1.15 * said, least), f"{op.name} is off by {error:.2f} ulp, not {said}"
