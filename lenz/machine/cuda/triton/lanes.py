"""The dimensions of a program's tiles."""

from __future__ import annotations

from lenz.errors import InternalError
from lenz.ir.dtype import DType
from lenz.ir.kernel import For, Kernel, walk
from lenz.machine.cuda.triton.random import Pairs
from lenz.machine.cuda.triton.text import NO_DIMS, Dims, Term
from lenz.ops.emission import triton_type
from lenz.records import dataclass, field
from lenz.sym import Var


def widths_of(k: Kernel) -> dict[Var, int]:
    """The lane variables of a kernel in the order of the dimensions, with their widths."""
    loops = [s for s in walk(k.body) if isinstance(s, For) and s.kind == "lane"]
    if not all(s.axis.width for s in loops):
        raise InternalError(f"{k.name} has lanes without a width", pass_name="codegen")
    return {s.axis.var: s.axis.width for s in loops}


@dataclass(slots=True)
class Lanes:
    """For each dimension: its variable, its width, and the condition under which a lane is active.

    `tails` holds None for a dimension whose lanes all have an element. `fast` are the dimensions in
    which a tile over several dimensions is contiguous. `pairs` are the pairs of the last lanes.
    """

    vars: list[Var]
    widths: list[int]
    tails: list[Term | None] = field(default_factory=list)
    fast: Dims = NO_DIMS
    pairs: Pairs | None = None

    def place(self, d: int) -> str:
        """The subscript that turns a vector of lanes into one dimension of a tile."""
        if len(self.vars) == 1:
            return ""
        return f"[{', '.join(':' if k == d else 'None' for k in range(len(self.vars)))}]"

    def shape(self, dims: Dims) -> str:
        """The shape of a tile that has lanes in the dimensions."""
        sizes = [str(w) if d in dims else "1" for d, w in enumerate(self.widths)]
        return f"[{', '.join(sizes)}]" if dims else "[]"

    def spread(self, term: Term, dims: Dims, dtype: DType) -> str:
        """The text of a value broadcast to every lane of the dimensions."""
        if term.text.lstrip("(-")[0].isdigit() and " " not in term.text:
            # A Python number, which has no shape to broadcast, and no type.
            return f"tl.full({self.shape(dims)}, {term.text}, {triton_type(dtype)})"
        if term.dims == dims:
            return term.text
        return f"tl.broadcast_to({term.text}, {self.shape(dims)})"

    def conditions(self, dims: Dims) -> list[Term]:
        """The conditions of the dimensions that have one."""
        return [t for d in sorted(dims) if (t := self.tails[d]) is not None]
