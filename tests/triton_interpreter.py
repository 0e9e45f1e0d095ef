"""Triton's interpreter as a machine that watches memory; kernels run on the CPU.

`launch(k, arguments, sizes, programs)` runs the text of one kernel. Pointers are numbers of an
address space of this file's own, so that each access is looked at before it happens:

- it stays inside of the elements that its parameter declares, and writes no input;
- no program touches an element that another program writes, in whatever order they run;
- a program that reads what it wrote has a barrier in between, and so has one that writes what it
  read, unless the value that it writes was computed from what it read there;
- a workspace is for words that one program writes once, and that later ones wait for;
- lanes that are switched off get numbers that nobody asked for (NaN, or 0x5a bytes).

Where the interpreter differs from a GPU it is put right: tests/ops/interpret_kernels.py for the
arithmetic; here libdevice, and reductions, which combine halves of a tile instead of walking
through it. bf16, which the interpreter holds as integers, may be loaded, stored, compared with
nothing, and converted from and to f32 only.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

from lenz.machine.cuda.triton.compile import KernelText
from tests.ops import interpret_kernels

__all__ = ["Argument", "Fault", "launch"]

SHIFT = 44  # bytes of address space per parameter, as a power of two; the base is in its middle
MIDDLE = 1 << (SHIFT - 1)
NOBODY, SEVERAL = -1, -2
NONE: frozenset[int] = frozenset()
_COUNT = itertools.count()
BF16_OPS = (
    "create_bitcast", "create_broadcast", "create_expand_dims", "create_fp_to_fp", "create_fp_ext",
    "create_fp_trunc", "create_masked_load", "create_masked_store", "create_load", "create_store",
    "create_select", "create_splat", "create_addptr", "create_reshape", "create_join",
)  # fmt: skip


class Fault(AssertionError):
    """An access that a kernel may not do."""


@dataclass(slots=True)
class Argument:
    """Memory of one pointer parameter: a flat tensor of exactly its elements.

    `may_write` and `may_read` say what the parameter is for; `last_wins` that several updates may
    meet at an element, as those of a scatter may: the interpreter runs them in order. `is_work` is
    for a workspace, which starts as zeros.
    """

    name: str
    memory: torch.Tensor
    may_read: bool
    may_write: bool
    last_wins: bool = False
    is_work: bool = False
    data: Any = None
    writer: Any = None
    reader: Any = None
    fresh: Any = None
    loads: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        n = self.memory.numel()
        self.data = self.memory.view(raw[self.memory.element_size()]).numpy()
        self.writer, self.reader = np.full(n, NOBODY), np.full(n, NOBODY)
        self.fresh = np.zeros(n, dtype=bool)  # written by this program since the last barrier
        assert not (self.is_work and self.data.any()), f"%{self.name} is not zero"

    def read(self, at: Any, dtype: Any, program: int, serial: int) -> Any:
        """The elements, for a load with a number of its own."""
        self.check(at, "read")
        if self.is_work:
            if not self.data[at].all():
                raise Fault(f"%{self.name}: program {program} waits for what no earlier one wrote")
            return self.data[at].view(dtype)
        if not self.may_read:
            raise Fault(f"%{self.name} is read, which is only written")
        others = self.writer[at]
        if ((others != NOBODY) & (others != program)).any():
            raise Fault(f"%{self.name}: program {program} reads what another one wrote")
        if self.fresh[at].any():
            raise Fault(f"%{self.name} is read without a barrier after it was written")
        self.reader[at] = np.where(
            (self.reader[at] == NOBODY) | (self.reader[at] == program), program, SEVERAL
        )
        if self.may_write:
            self.loads[serial] = at
        return self.data[at].view(dtype)

    def write(self, at: Any, values: Any, program: int, depends: frozenset[int]) -> None:
        """Set the elements; `depends` are the loads that the values were computed from."""
        self.check(at, "written")
        if self.is_work:
            raise Fault(f"%{self.name} is a workspace, and is written by a store")
        if not self.may_write:
            raise Fault(f"%{self.name} is written, which is only read")
        if self.last_wins:
            self.data[at] = values.view(self.data.dtype)
            return
        places, first, back = np.unique(at, return_index=True, return_inverse=True)
        if len(places) < len(at) and (values != values[first][back]).any():
            raise Fault(f"%{self.name}: lanes store different values to one element")
        for who, what in ((self.writer[at], "writes"), (self.reader[at], "reads")):
            if ((who != NOBODY) & (who != program)).any():
                raise Fault(f"%{self.name}: program {program} writes what another one {what}")
        for serial, loaded in self.loads.items():
            if serial not in depends and np.isin(loaded, at).any():
                raise Fault(f"%{self.name} is overwritten without a barrier after it was read")
        self.writer[at] = program
        self.fresh[at] = True
        self.data[at] = values.view(self.data.dtype)

    def check(self, at: Any, what: str) -> None:
        """Raise Fault unless the elements exist."""
        wrong = (at < 0) | (at >= len(self.data))
        if wrong.any():
            text = f"%{self.name} is {what} at {at[wrong][0]}, it has {len(self.data)} elements"
            raise Fault(text)

    def sync(self) -> None:
        """All threads of the program are here."""
        self.fresh[:] = False
        self.loads.clear()


class Machine(InterpreterBuilder):  # type: ignore[misc]
    """The operations of the interpreter, on the memory of the arguments of one launch."""

    def __init__(self, arguments: Sequence[Argument]) -> None:
        super().__init__()
        self.options = interpreter.interpreter_builder.options
        self.arguments = arguments
        self.count = 0

    def start(self, program: int) -> None:
        """Run the next operations as one program of the grid."""
        self.set_grid_idx(program, 0, 0)
        for a in self.arguments:
            a.sync()

    def pointer(self, k: int, kind: Any) -> Any:
        """The base pointer of argument k."""
        address = np.array([((k + 1) << SHIFT) + MIDDLE], dtype=np.uint64)
        return tl.tensor(TensorHandle(address, kind), kind)

    def places(self, pointers: Any, runs: Any) -> tuple[Argument | None, Any]:
        """The argument that the pointers of one access point into, and the elements."""
        found = pointers.data[runs]
        if not found.size:
            return None, None
        # Overflow of an index may lead out of the space of one parameter: all have to agree.
        owner = found >> np.uint64(SHIFT)
        if (owner != owner[0]).any() or not 1 <= owner[0] <= len(self.arguments):
            raise Fault(f"an access far away, at {found[:4]}")
        a = self.arguments[int(owner[0]) - 1]
        offset = found.astype(np.int64) - ((int(owner[0]) << SHIFT) + MIDDLE)
        return a, offset // a.data.itemsize

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *_: Any) -> Any:
        kind = ptrs.get_element_ty()
        dtype = interpreter._get_np_dtype(kind)
        runs = np.broadcast_to(mask.data.astype(bool), ptrs.data.shape)
        junk = b"\x5a" * dtype.itemsize
        out = np.full(ptrs.data.shape, np.frombuffer(junk, dtype)[0], dtype=dtype)
        if kind.is_floating():
            out[...] = np.frombuffer(b"\xff" * dtype.itemsize, dtype)[0]
        if other is not None:
            out[...] = other.data
        a, at = self.places(ptrs, runs)
        self.count += 1
        if a is not None:
            out[runs] = a.read(at, dtype, self.grid_idx[0], self.count)
        made = TensorHandle(out, kind)
        made.set_attr("loads", frozenset((self.count,)))
        return made

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *_: Any) -> None:
        runs = np.broadcast_to(mask.data.astype(bool), ptrs.data.shape)
        a, at = self.places(ptrs, runs)
        if a is not None:
            values = np.broadcast_to(value.data, ptrs.data.shape)[runs]
            a.write(at, values, self.grid_idx[0], _loads([ptrs, value, mask]))

    def create_atomic_rmw(self, op: Any, ptrs: Any, value: Any, mask: Any, *_: Any) -> Any:
        """Updates in the order of the lanes; who wrote an element before does not matter."""
        runs = np.broadcast_to(mask.data.astype(bool), ptrs.data.shape)
        a, at = self.places(ptrs, runs)
        values = np.broadcast_to(value.data, ptrs.data.shape)
        if a is not None:
            assert a.may_read and a.may_write, f"an update of %{a.name}"
            a.check(at, "updated")
            memory = a.data.view(values.dtype)
            name = str(op).rsplit(".", 1)[-1].upper()
            assert a.is_work == (name == "XCHG"), f"an update of %{a.name}: {name}"
            if a.is_work:
                if memory[at].any() or not values[runs].all():
                    raise Fault(f"%{a.name}: a word is written twice, or without its flag")
                memory[at] = values[runs]
                return TensorHandle(np.zeros(ptrs.data.shape, values.dtype), value.dtype.scalar)
            if name in ("UMAX", "UMIN"):
                unsigned = np.dtype(f"u{values.dtype.itemsize}")
                memory, values = memory.view(unsigned), values.view(unsigned)
            ways = {"FADD": np.add, "ADD": np.add, "MAX": np.maximum, "UMAX": np.maximum,
                    "MIN": np.minimum, "UMIN": np.minimum}  # fmt: skip
            ways[name].at(memory, at, values[runs])
        return TensorHandle(np.zeros(ptrs.data.shape, value.data.dtype), value.dtype.scalar)

    def create_barrier(self) -> None:
        for a in self.arguments:
            a.sync()

    def get_bf16(self, value: float) -> Any:
        """A constant, which the interpreter has none of."""
        bits = torch.tensor([value], dtype=torch.bfloat16).view(torch.uint16).numpy()
        return TensorHandle(bits, tl.bfloat16)

    def create_splat(self, ret_ty: Any, arg: Any) -> Any:
        """A comparison of scalars is a bool, though its handle has the type of the operands."""
        if arg.data.dtype == np.bool_:
            return TensorHandle(np.full(ret_ty.shape, arg.data), tl.int1)
        return super().create_splat(ret_ty, arg)

    def create_lshr(self, x: Any, y: Any) -> Any:
        """Zeros come in from the left; NumPy looks at the sign."""
        unsigned = np.dtype(f"u{x.data.itemsize}")
        shifted = x.data.view(unsigned) >> y.data.astype(unsigned)
        return TensorHandle(shifted.view(x.data.dtype), x.dtype.scalar)


def _loads(values: Sequence[Any]) -> frozenset[int]:
    """The loads that values were computed from."""
    found = NONE
    for v in values:
        if isinstance(v, TensorHandle):
            loads = v.attr.get("loads", NONE)
            found = found | loads if found else loads
        elif isinstance(v, (list, tuple)):
            found |= _loads(v)
    return found


def _watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The operation; its result remembers the loads that its operands came from."""
    may_be_bf16 = name in BF16_OPS

    def run(self: Machine, *args: Any) -> Any:
        if not may_be_bf16:
            for a in args:
                if isinstance(a, TensorHandle) and a.dtype.scalar.name == tl.bfloat16.name:
                    raise Fault(f"{name} of bf16, of which only f32 may be made")
        made = method(self, *args)
        if name == "create_inline_asm":
            _remember(made.get_result(0), args)
        elif isinstance(made, TensorHandle):
            _remember(made, args)
        return made

    return run


def _remember(made: Any, args: Sequence[Any]) -> None:
    loads = _loads(args)
    if loads:
        made.attr["loads"] = made.attr.get("loads", NONE) | loads


def _reduce(self: Any, input: Any) -> Any:
    """Combine the halves of a tile, then of what is left; pairs stand apart, as on a GPU."""
    parts, axis = list(input), self.axis
    shape = parts[0].handle.data.shape
    loads = _loads([p.handle for p in parts])
    assert shape[axis] & (shape[axis] - 1) == 0, f"a tile of {shape}"
    datas = [p.handle.data for p in parts]
    while datas[0].shape[axis] > 1:
        halves = [_halves(d, axis) for d in datas]
        first, second = [
            [self.to_tensor(h[k], p.dtype) for h, p in zip(halves, parts, strict=True)]
            for k in (0, 1)
        ]
        found = self.combine_fn(*first, *second)
        found = found if isinstance(found, tuple) else (found,)
        datas = [f.handle.data.reshape(halves[0][0].shape) for f in found]
    if not self.keep_dims:
        datas = [np.squeeze(d, axis) for d in datas]
    made = [self.to_tensor(d, p.dtype) for d, p in zip(datas, parts, strict=True)]
    for m in made:
        m.handle.attr["loads"] = loads
    return made


def _halves(data: Any, axis: int) -> list[Any]:
    """As `np.split`, which takes longer than what is computed of the halves."""
    before, half = (slice(None),) * (axis % data.ndim), data.shape[axis] // 2
    first, second = (*before, slice(half)), (*before, slice(half, None))
    return [data[first], data[second]]


def _scan(self: Any, input: Any) -> Any:
    """Running results, one slice of the tile after the other."""
    (x,), axis = input, self.axis
    slices = np.split(x.handle.data, x.handle.data.shape[axis], axis)
    total = self.to_tensor(slices[0], x.dtype)
    found = [slices[0]]
    for part in slices[1:]:
        total = self.combine_fn(total, self.to_tensor(part, x.dtype))
        found.append(total.handle.data.reshape(part.shape))
    made = self.to_tensor(np.concatenate(found, axis), x.dtype)
    made.handle.attr["loads"] = _loads([x.handle])
    return [made]


class _Libdevice:
    """The functions of libdevice that lenz calls, computed in double by torch."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        functions: dict[str, Callable[..., Any]] = {
            "rint": torch.round, "fabs": torch.abs, "pow": torch.pow, "nextafter": torch.nextafter,
            "fmod": torch.fmod, "log2": torch.log2, "atan2": torch.atan2,
        }  # fmt: skip
        function = functions.get(name) or getattr(torch, name)

        def call(*given: Any) -> Any:
            args = [interpreter.interpreter_semantic.to_tensor(a) for a in given]
            handles = [a.handle for a in args]
            dtype = handles[0].data.dtype
            # nextafter depends on the type; the others are the better for being rounded once.
            work = dtype if name == "nextafter" else np.dtype(np.float64)
            xs = [torch.from_numpy(np.array(h.data, dtype=work)) for h in handles]
            found = function(*torch.broadcast_tensors(*xs)).numpy().astype(dtype)
            made = TensorHandle(found, handles[0].dtype.scalar)
            _remember(made, handles)
            kind = args[0].type.scalar
            is_tile = any(a.type.is_block() for a in args)
            return tl.tensor(made, tl.block_type(kind, [*found.shape]) if is_tile else kind)

        return call


_patch_tensor, _patch_core = interpreter._patch_lang_tensor, interpreter._patch_lang_core
_block, _np_dtype = tl.block_type.__init__, interpreter._get_np_dtype


def _patch_scalars(tensor: Any, scope: Any) -> None:
    """Scalars are arrays of one element, which newer NumPy does not take for numbers."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())
    scope.set_attr(tensor, "__init__", _tensor)
    scope.set_attr(tl.block_type, "__init__", _type)


@cache
def _shapes(shape: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
    """The parts of the types of tiles that depend on the shape alone, and those of tiles."""
    if not shape:
        return None, None, tl.tuple([]), tl.constexpr(1)
    made = tl.block_type.__new__(tl.block_type)
    _block(made, tl.int1, [*shape])
    numbers = tl.tuple([tl.constexpr(n) for n in made.shape])
    return made.shape, made.numel, numbers, tl.constexpr(made.numel)


def _type(self: Any, kind: Any, shape: Any) -> None:
    """Triton makes a type for each tile of each operation: a seventh of the time of kernels."""
    self.shape, self.numel, *_ = _shapes((*shape,))
    self.element_ty, self.name = kind, f"<{kind}>"


def _tensor(self: Any, handle: Any, kind: Any) -> None:
    """Likewise."""
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    *_, self.shape, self.numel = _shapes((*kind.shape,) if kind.is_block() else ())


@cache
def _dtype_of(kind: Any) -> Any:
    return _np_dtype(kind)


def _np_dtype_of(kind: Any) -> Any:
    """As Triton's own function, which makes a table of all types to look in."""
    kind = kind.scalar
    return _np_dtype(kind) if kind.is_ptr() else _dtype_of(kind)


def _patch_loops(lang: Any, scope: Any) -> None:
    """The variable of a loop is a tensor of 32 bits, and not an int of Python's."""
    _patch_core(lang, scope)
    counted = lang.range

    def loop(*args: Any, **options: Any) -> Iterator[Any]:
        for k in counted(*args, **options):
            yield tl.tensor(TensorHandle(np.array([k], dtype=np.int32), tl.int32), tl.int32)

    scope.set_attr(lang, "range", loop)
    scope.set_attr(lang, "sort", lambda x: _sorted(x, x.shape[-1], False))
    scope.set_attr(lang, "topk", lambda x, k: _sorted(x, k, True))


def _sorted(x: Any, count: int, falls: bool) -> Any:
    """The first elements of each row of a tile in order, as Triton's own functions give them."""
    data = np.sort(x.handle.data, -1)
    data = data[..., ::-1] if falls else data
    made = TensorHandle(np.ascontiguousarray(data[..., :count]), x.dtype.scalar)
    _remember(made, [x.handle])
    return tl.tensor(made, tl.block_type(x.dtype.scalar, list(made.data.shape)))


def _prepare() -> None:
    interpret_kernels._correct()
    interpreter._patch_lang_tensor = _patch_scalars
    interpreter._patch_lang_core = _patch_loops
    interpreter._get_np_dtype = _np_dtype_of
    ReduceOps.generic_reduce = _reduce
    ScanOps.generic_scan = _scan
    for name in dir(Machine):
        if name.startswith("create_") and name != "create_masked_load":
            setattr(Machine, name, _watched(name, getattr(Machine, name)))


_prepare()


@contextmanager
def _running(machine: Machine) -> Iterator[None]:
    """Let the interpreter work on a machine."""
    before = interpreter.interpreter_builder, interpreter.interpreter_semantic
    interpreter.interpreter_builder = machine
    interpreter.interpreter_semantic = TritonSemantic(machine)
    try:
        with triton.knobs.runtime.scope(), np.errstate(all="ignore"):
            triton.knobs.runtime.interpret = True
            yield
    finally:
        interpreter.interpreter_builder, interpreter.interpreter_semantic = before


@cache
def _function(k: KernelText) -> Any:
    """The text as a Python function; Triton reads its lines from the line cache."""
    place = f"<interpreted {next(_COUNT)}>"
    linecache.cache[place] = (len(k.text), None, k.text.splitlines(True), place)
    module: dict[str, Any] = {"__name__": place}
    exec(compile(k.text, place, "exec"), module)  # text that lenz has just made
    found = module[k.name]
    for name, value in module.items():
        if isinstance(value, interpreter.InterpretedFunction) and value is not found:
            module[name] = value.fn  # to call it as it is saves a millisecond
    if "libdevice" in module:
        module["libdevice"] = _Libdevice()
    return found


def launch(
    k: KernelText, arguments: Sequence[Argument], sizes: Sequence[int], programs: int
) -> None:
    """Run every program of a kernel; `arguments` are its pointers, `sizes` the numbers after them.

    Raises Fault for an access that a kernel may not do.
    """
    machine = Machine(arguments)
    machine.set_grid_dim(programs, 1, 1)
    values: list[Any] = []
    for n, kind in enumerate(k.signature):
        type_ = tl.str_to_ty(kind, None)
        if n < len(arguments):
            values.append(machine.pointer(n, type_))
        else:
            number = np.array([sizes[n - len(arguments)]], dtype=interpreter._get_np_dtype(type_))
            values.append(tl.tensor(TensorHandle(number, type_), type_))
    with _running(machine):
        fn = _function(k)
        run = fn.rewrite()
        run.__globals__["interpreter_semantic"] = interpreter.interpreter_semantic
        scope = interpreter._patch_lang(fn.fn)
        try:
            for p in range(programs):
                machine.start(p)
                run(*values)
        finally:
            scope.restore()
