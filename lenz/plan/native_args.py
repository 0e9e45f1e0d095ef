"""How the native code of a plan takes its arguments. Unexpected ones are left to Python.

Nothing changes before all arguments are checked, so that the Python function can start over.
"""

from __future__ import annotations

from lenz.ir.plan import BindSize, Input, LaunchStep, Plan, SizeInput
from lenz.ir.tensor import TensorType
from lenz.plan.native_frame import Frame, kind_and_number
from lenz.plan.native_text import CODES
from lenz.sym import Int, Var, as_multiple


def take_arguments(f: Frame, p: Plan) -> None:
    """Take the arguments from the list, empty it, and give each tensor a slot."""
    out, n = f.out, len(p.inputs)
    modes = out.let("call i64 @_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv()")
    expect(f, f"icmp eq i64 {modes}, 0")
    tensors = {i.name: (k, i) for k, i in enumerate(p.inputs) if isinstance(i, Input)}
    rows = [x for k, i in tensors.values() for x in _row(f, k, i, i.name in p.aligned)]
    told = f"ptr {out.array(rows)}, i64 {len(tensors)}"
    told += f", {type_addresses(f, 'type_tensor', 'type_parameter')}"
    told += f", i64 {f.layout.handle}, i64 {f.layout.keys}, ptr %o"
    expect(f, f"call i1 @are_as_told(ptr %args, i64 {n}, {told})")
    for name, (_, i) in tensors.items():
        b = f.new(name)
        b.is_object, b.dtype = True, i.type.dtype
    integers = [_integer(f, i, k) for k, i in enumerate(p.inputs) if isinstance(i, SizeInput)]
    for read in p.binds:
        if read.var not in f.sizes:
            _divided(f, read.var, size_read(f, read), read.factor)
    for var, whole, factor in filter(None, integers):
        _divided(f, var, whole, factor)
    for name, most in p.most:
        for v, size in f.sizes.items():
            if v.name == name:
                expect(f, f"icmp sle i64 {size}, {most}")
    for name, (_, i) in tensors.items():
        if not _is_static(i):
            told = f"{tensor(i.type)}, {f.layout_of(i.type)}"
            expect(f, f"call i1 @fits(ptr {f.handle(name)}, {told})")
    graphs = [s for s in p.flat if isinstance(s, LaunchStep) and s.graph]
    starts = [out.let(f"call ptr @data(ptr {f.handle(name)})") for name in tensors if graphs]
    for s in graphs:
        _ready(f, s, starts)
    for s in graphs[:1]:  # nothing after this leaves the call to Python
        expect(f, f'call i1 @enter(ptr @"{s.kernel}")')
    out.put(f"call void @own(ptr %o, i64 {len(tensors)})")
    out.put(f"call i32 @PyList_SetSlice(ptr %args, i64 0, i64 {n}, ptr null)")


def tensor(t: TensorType) -> str:
    """The dtype as an argument."""
    return f"i32 {CODES[t.dtype.name]}"


def type_addresses(f: Frame, *names: str) -> str:
    """The addresses of Python types of `TYPES`, which differ between processes, as numbers."""
    for name in names:
        f.out.declare(name, f"@{name} = external global i8")
    return ", ".join([f"i64 ptrtoint (ptr @{name} to i64)" for name in names])


def size_read(f: Frame, s: BindSize) -> str:
    """The size or stride of a tensor that a step binds."""
    which = "strides" if s.stride else "sizes"
    return f.out.let(f"call i64 @read_{which}(ptr {f.handle(s.source)}, i64 {s.dim})")


def expect(f: Frame, test: str) -> None:
    """Leave the call to the Python function unless the test holds."""
    f.out.unless(test, "slow")


def _row(f: Frame, k: int, i: Input, is_aligned: bool) -> list[str]:
    """What `are_as_told` in native.ll is told of a tensor, the argument with number `k`."""
    kind, gpu = ("", -1) if i.anywhere else kind_and_number(i.type.device)
    # A tensor that may be anywhere is dense there and has memory.
    mask = f.layout.mask if kind else f.layout.bare | f.layout.negative * i.signed
    keys = f.layout.plain[kind or "cpu"] & mask
    sides = (*i.type.shape, *i.type.layout.stride) if _is_static(i) else ()
    rank = len(i.type.shape) if _is_static(i) else -1
    words = k, gpu, mask, keys, int(is_aligned), CODES[i.type.dtype.name], rank
    return [*map(str, words), *map(f.number, sides)]


def _is_static(i: Input) -> bool:
    """Whether the sizes and strides of a tensor are numbers."""
    return all(isinstance(s, Int) for s in (*i.type.shape, *i.type.layout.stride))


def _ready(f: Frame, s: LaunchStep, starts: list[str]) -> None:
    """Check that a CUDA graph may be replayed for arguments at these addresses."""
    out = f.out
    f.out.declare(s.kernel, f'@"{s.kernel}" = external global i8')
    stream = out.let(f"call ptr @stream_of(i32 {kind_and_number(s.device)[1]})")
    at = out.array(starts, "ptr")
    sizes = out.array(list(f.sizes.values()))
    expect(f, f'call i1 @ready(ptr @"{s.kernel}", ptr {stream}, ptr {at}, ptr {sizes})')


def _integer(f: Frame, i: SizeInput, k: int) -> tuple[Var, str, int] | None:
    """Check an integer argument; returns the size if the argument is a multiple of it."""
    item = f.out.let(f"call ptr @PyList_GetItem(ptr %args, i64 {k})")
    expect(f, f"call i1 @is_either(ptr {item}, {type_addresses(f, 'type_int')}, i64 0)")
    multiple = as_multiple(i.value)
    if multiple is None:
        return None  # unused, as in the Python function
    expect(f, f"call i1 @fits_in_64_bits(ptr {item})")
    number = f.out.let(f"call i64 @PyLong_AsLongLong(ptr {item})")
    if isinstance(i.value, Var):
        f.bind(i.value, number)
        return None
    return multiple[0], number, multiple[1]


def _divided(f: Frame, var: Var, whole: str, factor: int) -> None:
    """Determine a size from a multiple of it; the first such number counts."""
    if factor > 1:
        part = f.out.let(f"sdiv i64 {whole}, {factor}")
        again = f.out.let(f"mul i64 {part}, {factor}")
        expect(f, f"icmp eq i64 {again}, {whole}")
        whole = part
    if var not in f.sizes:
        f.bind(var, whole)
