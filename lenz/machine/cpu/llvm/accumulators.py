"""Accumulators of open reductions and scans: in registers, or in an array on the stack.

A reduction ends with the outermost loop it runs over. If it does not reduce over some inner loop,
each point of that loop has its own accumulator, in an array. Otherwise the accumulators are
registers that the loops carry, one per copy of the body.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lenz.errors import InternalError
from lenz.ir.dtype import I32, DType
from lenz.ir.kernel import For, Reduce, Scan, Stmt, position
from lenz.ir.tensor import Axis
from lenz.machine.cpu.llvm.indices import index_type
from lenz.machine.cpu.llvm.reductions import is_arg, state_dtype
from lenz.machine.cpu.llvm.scopes import Cell
from lenz.sym import ZERO, Sym, Var


@dataclass(slots=True)
class Accumulator:
    """The state of one reduction.

    dtypes   types of the parts of the state: the value and, for a position, its index
    lanes    True when the registers are vectors
    across   True when the lanes are reduced over and are added up at the end
    copies   copies of the registers; `merge`: they are reduced over as well
    axes     the axes of the array of accumulators, empty for registers
    arrays   names of the arrays, one per part
    """

    stmt: Reduce | Scan
    dtypes: tuple[DType, ...]
    position: Sym
    lanes: bool
    across: bool
    copies: int
    merge: bool
    axes: tuple[Axis, ...]
    cells: list[list[Cell]] = field(default_factory=list)
    arrays: tuple[str, ...] = ()

    @property
    def offset(self) -> Sym:
        """The flat position in the arrays, over the variables of the axes."""
        flat: Sym = ZERO
        for a in self.axes:
            flat = flat * _extent(a) + a.var
        return flat

    @property
    def size(self) -> int:
        """Elements of the arrays."""
        size = 1
        for a in self.axes:
            size *= _extent(a)
        return size


def _extent(a: Axis) -> int:
    if a.extent.hi is None:
        raise InternalError(
            f"accumulators over {a.name}, whose extent is unbounded", pass_name="codegen"
        )
    return max(a.extent.hi, 1)


def over(s: Reduce | Scan) -> tuple[Var, ...]:
    """The variables of the loops that a statement accumulates over."""
    return s.over if isinstance(s, Reduce) else (s.over,)


def reduces_of(loop: For) -> list[tuple[Reduce | Scan, tuple[For, ...]]]:
    """The reductions and scans that end with a loop, each with the loops from there down to it."""
    found: list[tuple[Reduce | Scan, tuple[For, ...]]] = []

    def visit(body: tuple[Stmt, ...], path: tuple[For, ...]) -> None:
        for s in body:
            if isinstance(s, For):
                visit(s.body, (*path, s))
            elif isinstance(s, (Reduce, Scan)):
                found.append((s, path))

    visit(loop.body, (loop,))
    inside = loop.axis.var
    return [(s, path) for s, path in found if inside in over(s)]


def names_reduced(body: tuple[Stmt, ...]) -> set[str]:
    """Names of all reductions and scans in a body."""
    found: set[str] = set()
    for s in body:
        if isinstance(s, For):
            found |= names_reduced(s.body)
        elif isinstance(s, (Reduce, Scan)):
            found.add(s.name)
    return found


def position_of(s: Reduce | Scan, path: tuple[For, ...]) -> Sym:
    """The flat position of an element over the reduced axes, outermost first."""
    axes = {f.axis.var: f.axis for f in path}
    for v in over(s):
        if v not in axes:
            raise InternalError(
                f"{s.name} is reduced over {v.name}, which is not around it", pass_name="codegen"
            )
    return position([axes[v] for v in over(s)])


def state_dtypes(s: Reduce | Scan, position: Sym) -> tuple[DType, ...]:
    """Types of the parts of the state."""
    first = state_dtype(s.kind, s.value.dtype)
    return (first, index_type(position)) if is_arg(s.kind) else (first, I32)[:1]
