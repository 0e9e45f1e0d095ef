"""Expressions to Triton text: one line per distinct node, in the outermost body that can hold it.

A node that reads a buffer which the kernel writes stays in its body.
"""

from __future__ import annotations

from typing import Any

from lenz.ir.dtype import BOOL, I64, DType
from lenz.ir.expr import Expr, interpret, syms_of, unmasked
from lenz.ir.op import CONST, INDEX, LOAD, MASKED, REF
from lenz.machine.cuda.triton.indices import Indices, joint
from lenz.machine.cuda.triton.lanes import Lanes
from lenz.machine.cuda.triton.legalise import MACHINE
from lenz.machine.cuda.triton.random import FUNCTION
from lenz.machine.cuda.triton.text import NO_DIMS, Dims, Term, Text
from lenz.machine.cuda.triton.types import constant
from lenz.machine.reads import Mask, Walk
from lenz.ops.arith import DIV
from lenz.ops.cast import cast_text
from lenz.sym import Add, Int, Sym, Var, divisor
from lenz.sym.expr import sum_of

UNIT = 8  # elements of a half type in 16 bytes, the size of one access


class Values(Walk[Term]):
    """The values of expressions in the current function.

    locals   the tiles that locals are, with their element types
    checks   True once the text holds an assertion
    functions names of the functions that the text calls
    floor    level of the innermost loop that may not run: what it reads may not exist
    """

    def __init__(self, text: Text, indices: Indices, lanes: Lanes, written: frozenset[str]) -> None:
        super().__init__(text.memo, text.keep, written)
        self.text = text
        self.indices = indices
        self.locals: dict[str, tuple[Term, DType]] = {}
        self.lanes = lanes
        self.dirty: set[str] = set()
        self.checks = False
        self.functions: dict[str, None] = {}
        self.floor = 0

    def forget(self, buffer: str) -> None:
        """As in `Walk`; threads also wait for each other before the buffer is read again."""
        super().forget(buffer)
        self.dirty.add(buffer)

    def barrier(self) -> None:
        """A barrier for all threads of the program."""
        self.text.put(self.text.level, "tl.debug_barrier()")
        self.dirty.clear()

    def ahead(self, e: Expr) -> None:
        """For an expression that divides, write its loads first, then shared values, then the rest.

        A division is a branch: a load after it waits for it, and a value before it stays alive.
        """
        varies: dict[Expr, bool] = {}
        nodes = unmasked((e,))
        if all(x.op is not DIV for x in nodes):
            return

        def moves(x: Expr, args: list[bool]) -> bool:
            own = x.op is REF and bool(self.refs[x.attrs[0]].dims)
            lanes = frozenset(self.lanes.vars)
            return own or any(args) or any(not lanes.isdisjoint(s.free_vars) for s in syms_of(x))

        interpret(e, moves, varies)
        loads = [x for x in nodes if x.op is LOAD and not x.args]
        for x in (*loads, *(x for x in nodes if not varies[x])):
            self.value(x)

    def load(self, e: Expr) -> None:
        """Write the loads of an expression at once, of buffers that the kernel does not write."""
        own = self.written | self.locals.keys()
        for x in unmasked((e,)):
            if x.op is LOAD and not x.args and x.attrs[0] not in own:
                self.value(x)

    def visit(self, e: Expr, mask: Mask) -> Term:
        """The value of a node."""
        if e.op is CONST:
            return Term(constant(e.dtype, e.attrs[0]))
        if e.op is REF:
            return self.named(e.attrs[0])
        if e.op is INDEX:
            return self._index(e, mask)
        if e.op is LOAD:
            return self._load(e, mask)
        parts = self.operands(e, mask)
        dims, level = joint(parts)
        if e.op is MASKED:
            return self.text.let(f"tl.where({', '.join([p.text for p in parts])})", dims, level)
        if self.lanes.pairs is not None and (half := self.lanes.pairs.counters(e)) is not None:
            self.functions[FUNCTION] = None
            given = f"{parts[0].text}, {parts[1].text}, {self.indices.term(half, {}).text}"
            text = f"tl.reshape({FUNCTION}({given}), {self.lanes.shape(dims)})"
            return self.text.let(text, dims, level)
        texts = tuple([p.text for p in parts])
        form = e.op.form(MACHINE)
        if form.check is not None:
            level = self._assert(_written(form.check, e, texts), mask, dims, level)
        return self.text.let(_written(form.emit, e, texts), dims, level)

    def _assert(self, condition: str, mask: Mask, dims: Dims, level: int) -> int:
        """Stop the program, as eager does on a GPU, if the condition fails in an active lane."""
        self.checks = True
        runs = self._conjunction(mask, dims)
        level = max(level, self.floor)
        guard = "" if runs is None else f", mask={runs.text}"
        level = level if runs is None else max(level, runs.level)
        self.text.put(level, f'tl.device_assert({condition}, "index out of range in self"{guard})')
        return level

    def place(self, e: Expr, mask: Mask) -> Term:
        """The value of an operand as an index."""
        term = self.operand(e, mask)
        held = self.indices.dtype
        if e.dtype is held:
            return term
        cast = lambda: self.text.let(cast_text(held, e.dtype, term.text), term.dims, term.level)
        return self.text.once(("cast", term.text), cast)

    def _index(self, e: Expr, mask: Mask) -> Term:
        s, dtype = e.attrs[0], e.dtype
        if isinstance(s, Int):  # typed: of two plain numbers Python computes more than 32 bits
            return self.text.let(cast_text(dtype, I64, constant(I64, s.value)), NO_DIMS, 0)
        term = self.indices.term(s, self.bound((s,), e.args, mask))
        return self.text.let(cast_text(dtype, self.indices.dtype, term.text), term.dims, term.level)

    def pointer(
        self, buffer: str, offset: Sym, bound: dict[Var, Term], mask: Mask, over: Dims = NO_DIMS
    ) -> tuple[str, str, Dims, int]:
        """The pointer to an element, the condition of the access ("" for none), dims, level.

        Lanes of `over` each access the element separately, even if they share it.
        """
        at = self.indices.term(offset, bound)
        runs = self._conjunction(mask, at.dims | over)
        text, dims, level = f"{buffer} + {at.text}", at.dims | over, at.level
        terms = offset.terms if isinstance(offset, Add) else ()
        first = sum_of([(t, c) for t, c in terms if not self.indices.term(t, bound).dims])
        rest = offset - first
        steps = all(v in self.lanes.vars for v in rest.free_vars)
        if len(at.dims) == 1 and steps and divisor(first) % UNIT:
            # Elements of odd rows are accessed one by one, at constant distances from one pointer:
            # softmax over rows of 8191 bf16 takes 98 us, and 112 with a pointer for each.
            text = f"({buffer} + {self.indices.term(first, bound).text})"
            text += f" + {self.indices.term(rest, bound).text}"
        if runs is not None:
            dims, level = dims | runs.dims, max(level, runs.level)
        for d in sorted(dims - at.dims):
            # Lanes that share an address but not a condition need a pointer each.
            text += f" + 0 * {self.lanes.vars[d].name}"
        return text, runs.text if runs is not None else "", dims, level

    def _load(self, e: Expr, mask: Mask) -> Term:
        buffer, (offset,), dtype = e.attrs
        if buffer in self.locals:
            return self.locals[buffer][0]
        bound = self.bound((offset,), e.args, mask)
        text, runs, dims, level = self.pointer(buffer, offset, bound, mask)
        level = max(level, self.floor)
        if buffer in self.written:
            level = self.text.level
            if buffer in self.dirty:
                self.barrier()
        value = f"tl.load({text}, {runs})" if runs else f"tl.load({text})"
        if len(dims) == 1 < len(self.lanes.vars) and not dims <= self.lanes.fast:
            value = self._column(text, mask, dims)
        return self.text.let(f"{value} != 0" if dtype is BOOL else value, dims, level)

    def _column(self, pointer: str, mask: Mask, dims: Dims) -> str:
        """A one-dimensional load along a dimension in which no tile is contiguous.

        As a column of the tile, Triton would load each element once per neighbour that a thread
        holds: 8 times for halves.
        """
        (d,) = dims
        shape, runs = f"[{self.lanes.widths[d]}]", self._conjunction(mask, dims)
        text = f"tl.reshape({pointer}, {shape})"
        if runs is not None:
            text += f", tl.reshape({self.lanes.spread(runs, dims, BOOL)}, {shape})"
        return f"tl.load({text}){self.lanes.place(d)}"

    def _conjunction(self, mask: Mask, dims: Dims) -> Term | None:
        """The condition of an access: all conditions around it, and that the lane is active."""
        parts = [self.operand(cond, mask[:k]) for k, cond in enumerate(mask)]
        dims, level = joint([Term("", dims), *parts])
        parts += self.lanes.conditions(dims)
        if not parts:
            return None
        dims, level = joint(parts)
        return Term(" & ".join([p.text for p in parts]), dims, level)


def _written(form: Any, e: Expr, texts: tuple[str, ...]) -> str:
    """A Triton form of an op (`ops/emission.py`), with the texts of its operands."""
    if isinstance(form, str):
        return form.format(*texts)
    return str(form(e.dtype, tuple([a.dtype for a in e.args]), texts, e.attrs))
