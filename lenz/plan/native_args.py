"""How the native code of a plan takes its arguments. Unexpected ones are left to Python.

Nothing changes before all arguments are checked, so that the Python function can start over.
"""

from __future__ import annotations

from lenz.ir.plan import BindSize, Input, LaunchStep, Plan, SizeInput
from lenz.plan.native_frame import Frame, kind_and_number, tensor, type_addresses
from lenz.sym import Var, as_multiple


def take_arguments(f: Frame, p: Plan) -> None:
    """Take the arguments from the list, empty it, and give each tensor a slot."""
    out, n = f.out, len(p.inputs)
    items = [out.let(f"call ptr @item(ptr %args, i64 {k}, i64 {n})") for k in range(n)]
    if items:
        expect(f, f"icmp ne ptr {items[0]}, null")  # null if the list has another length
    modes = out.let("call i64 @_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv()")
    expect(f, f"icmp eq i64 {modes}, 0")
    tensors = {
        i.name: (i, item) for i, item in zip(p.inputs, items, strict=True) if isinstance(i, Input)
    }
    handles = {name: _tensor(f, i, item) for name, (i, item) in tensors.items()}
    wholes = [
        found
        for i, item in zip(p.inputs, items, strict=True)
        if isinstance(i, SizeInput) and (found := _integer(f, i, item)) is not None
    ]
    for s in p.flat:
        if isinstance(s, BindSize) and s.source in handles and s.var not in f.sizes:
            which = "strides" if s.stride else "sizes"
            text = f"call i64 @read_{which}(ptr {handles[s.source]}, i64 {s.dim})"
            _divided(f, s.var, out.let(text), s.factor)
    for var, whole, factor in wholes:
        _divided(f, var, whole, factor)
    for name, most in p.most:
        for v, size in f.sizes.items():
            if v.name == name:
                expect(f, f"icmp sle i64 {size}, {most}")
    for name, (i, _) in tensors.items():
        told = f"{tensor(i.type)}, {f.layout_of(i.type)}"
        test = out.let(f"call i1 @fits(ptr {handles[name]}, {told})")
        expect(f, f"icmp eq i1 {test}, true")
    for name in p.aligned:
        test = out.let(f"call i1 @is_aligned(ptr {handles[name]})")
        expect(f, f"icmp eq i1 {test}, true")
    graphs = [s for s in p.flat if isinstance(s, LaunchStep) and s.graph]
    for s in graphs:
        _ready(f, s, list(handles.values()))
    for s in graphs[:1]:  # nothing after this leaves the call to Python
        test = out.let(f'call i1 @enter(ptr @"{s.kernel}")')
        expect(f, f"icmp eq i1 {test}, true")
    for name, (_, item) in tensors.items():
        out.put(f"call void @Py_IncRef(ptr {item})")
        f.new(name, item).dtype = tensors[name][0].type.dtype
    out.put(f"call i32 @PyList_SetSlice(ptr %args, i64 0, i64 {n}, ptr null)")


def expect(f: Frame, test: str) -> None:
    """Leave the call to the Python function unless the test holds."""
    f.out.unless(test, "slow")


def _tensor(f: Frame, i: Input, item: str) -> str:
    """Check that an argument is a plain tensor; returns its handle."""
    x = f.layout
    told = type_addresses(f, "type_tensor", "type_parameter")
    expect(f, f"icmp eq i1 {f.out.let(f'call i1 @is_either(ptr {item}, {told})')}, true")
    handle = f.inside(item)
    kind, number = ("", -1) if i.anywhere else kind_and_number(i.type.device)
    mask, keys = (x.mask, x.plain[kind]) if kind else (x.negative * i.signed, 0)
    test = f"call i1 @is_plain(ptr {handle}, i64 {x.keys}, i64 {mask}, i64 {keys})"
    expect(f, f"icmp eq i1 {f.out.let(test)}, true")
    if number >= 0:
        found = f.out.let(f"call i32 @index_of(ptr {handle})")
        expect(f, f"icmp eq i32 {found}, {number}")
    return handle


def _ready(f: Frame, s: LaunchStep, handles: list[str]) -> None:
    """Check that a CUDA graph may be replayed for these arguments, in the current stream."""
    out = f.out
    f.out.declare(s.kernel, f'@"{s.kernel}" = external global i8')
    stream = out.let(f"call ptr @stream_of(i32 {kind_and_number(s.device)[1]})")
    starts = out.array([out.let(f"call ptr @data(ptr {h})") for h in handles], "ptr")
    sizes = out.array(list(f.sizes.values()))
    test = f'call i1 @ready(ptr @"{s.kernel}", ptr {stream}, ptr {starts}, ptr {sizes})'
    expect(f, f"icmp eq i1 {out.let(test)}, true")


def _integer(f: Frame, i: SizeInput, item: str) -> tuple[Var, str, int] | None:
    """Check an integer argument; returns the size if the argument is a multiple of it."""
    test = f.out.let(f"call i1 @is_either(ptr {item}, {type_addresses(f, 'type_int')}, i64 0)")
    expect(f, f"icmp eq i1 {test}, true")
    multiple = as_multiple(i.value)
    if multiple is None:
        return None  # unused, as in the Python function
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
