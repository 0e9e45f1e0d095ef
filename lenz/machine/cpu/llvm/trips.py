"""Trip counts: counted loops, tests for empty loops, whole steps and the remainder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lenz.ir.kernel import For, If
from lenz.machine.cpu.llvm.function import Function
from lenz.machine.cpu.llvm.indices import Indices
from lenz.machine.cpu.llvm.scopes import Cell, Scopes, Value
from lenz.machine.cpu.llvm.writer import Writer
from lenz.sym import Sym, prove_divides


def repeat(
    scopes: Scopes, start: str, stop: str, step: int, cells: list[Cell], once: Callable[[str], None]
) -> None:
    """Run a body for start, start + step, ... below stop; a single step needs no loop."""
    some: AbstractContextManager[None] = nullcontext()
    if start[0] == "%" or stop[0] == "%":
        some = scopes.when(scopes.fn.let(scopes.fn.level, f"icmp slt i64 {start}, {stop}"), cells)
    elif int(start) >= int(stop):
        return
    elif int(start) + step >= int(stop):
        with scopes.block():
            once(start)
        return
    guard = scopes.guard
    with some:
        scopes.guard = guard  # the caller guarantees an iteration
        with scopes.loop(start, stop, step, cells) as counter:
            once(counter)


def positions(fn: Function, counter: str, copies: int, step: int) -> tuple[str, ...]:
    """counter, counter + step, ...: one per copy."""
    if counter[0] != "%":
        return tuple([str(int(counter) + k * step) for k in range(copies)])
    more = [fn.let(fn.level, f"add nuw nsw i64 {counter}, {k * step}") for k in range(1, copies)]
    return (counter, *more)


@contextmanager
def nonempty(indices: Indices, extent: Sym, cells: list[Cell]) -> Iterator[str]:
    """A body for extents of at least 1; unknown extents are checked."""
    scopes, text = indices.scopes, indices.scalar(extent).names[0]
    if extent.lo is not None and extent.lo >= 1:
        yield text
        return
    fn, is_empty = scopes.fn, text[0] != "%" and int(text) <= 0
    with scopes.when("false" if is_empty else fn.let(fn.level, f"icmp sgt i64 {text}, 0"), cells):
        yield text


def rounded(fn: Function, extent: Sym, text: str, step: int) -> str:
    """The largest multiple of step that does not exceed the extent."""
    if text[0] != "%":
        return str(int(text) // step * step)
    if prove_divides(step, extent):
        return text
    if step & (step - 1) == 0:
        return fn.let(fn.level, f"and i64 {text}, {-step}")
    return fn.let(fn.level, f"sub i64 {text}, {fn.let(fn.level, f'urem i64 {text}, {step}')}")


def left(fn: Function, counter: str, stop: str) -> Value:
    """Elements from the counter to the end."""
    if counter[0] != "%" and stop[0] != "%":
        return Value((str(int(stop) - int(counter)),), fn.level)
    return Value((fn.let(fn.level, f"sub nsw i64 {stop}, {counter}"),), fn.level)


def serial(w: Writer, s: For) -> None:
    """An innermost sequential loop, unrolled `tile.unroll` times.

    LLVM's back end does not unroll: sums at 10^6 computed positions took 1.5 ms, 0.9 with 4 copies.
    """
    scopes, fn, step = w.scopes, w.scopes.fn, w.tile.unroll

    def several(counter: str) -> None:
        for name in positions(fn, counter, step, 1):
            with scopes.block():
                w.indices.vars[s.axis.var] = Value((name,), fn.level)
                w.statements(s.body)

    with nonempty(w.indices, s.axis.extent, w.cells(s)) as extent:
        whole = rounded(fn, s.axis.extent, extent, step)
        repeat(scopes, "0", whole, step, w.cells(s), several)
        if whole != extent:
            w.counted(s, whole, extent, 1, 1)


def branch(w: Writer, s: If) -> None:
    """Each of the two bodies under its condition; the names that it defines end with it."""
    fn = w.scopes.fn
    sides = [w.indices.scalar(x).names[0] for x in (s.lower, s.upper)]
    holds = fn.let(fn.level, f"icmp slt i64 {', '.join(sides)}")
    fails = fn.let(fn.level, f"xor i1 {holds}, true") if s.orelse else ""
    for condition, inner in ((holds, s.then), (fails, s.orelse)):
        names, refs = {**w.names}, {**w.values.refs}
        with w.writing(inner), w.scopes.when(condition, []):
            w.statements(inner)
        w.names, w.values.refs = names, refs
        if not s.orelse:
            break


def vector_copies(w: Writer, s: For) -> int:
    """Copies of the body of a vector loop: `tile.unroll`, or fewer if it is short."""
    if w.scopes.copies > 1:
        return 1
    hi = s.axis.extent.hi
    return max(1, w.tile.unroll if hi is None else min(w.tile.unroll, hi // w.scopes.width))
