"""Exact symbolic integers for sizes, strides and indices."""

from lenz.sym.divide import ceildiv, flatten, power_of_two, unflatten
from lenz.sym.env import SymEnv
from lenz.sym.evaluate import as_multiple, evaluate, guess, positive, product, substitute
from lenz.sym.expr import (
    ONE,
    ZERO,
    Add,
    FloorDiv,
    Int,
    Max,
    Min,
    Mod,
    Mul,
    Sym,
    Var,
    as_int,
    children,
    sym,
)
from lenz.sym.extremum import maximum, minimum
from lenz.sym.polynomial import affine_in, step_of
from lenz.sym.prove import divisor, prove_divides, prove_eq, prove_le, prove_lt
from lenz.sym.text import show, to_python
