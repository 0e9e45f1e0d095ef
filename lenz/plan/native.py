"""A plan as native code: one function in LLVM's text, which CPython calls as a method.

`call(self, args)` takes the list of arguments, like the function of `plan/python.py`. It checks
them, allocates, launches kernels and calls library ops, without Python except for ops that have no
C entry. An unexpected argument, with other strides say, goes to the Python function, which copies,
compiles a fallback or raises. `self` is a tuple of the Python objects that it needs; the Python
function and `fail` come first.

Tensors are handles of libtorch's C shim. The handle of a Python tensor is inside its object, at an
offset that `runtime/native.py` determines. CPU kernels and library calls run without the GIL. If a
step fails, all values go to `fail`, which raises eager's error.
"""

from __future__ import annotations

from collections.abc import Mapping

from lenz.ir import plan as ir
from lenz.ir.graph import Atom, Named, Ref
from lenz.plan.native_args import size_read, take_arguments, tensor, type_addresses
from lenz.plan.native_frame import Frame, NativeBuffer, NotNative, TorchLayout, kind_and_number
from lenz.plan.native_shim import shim
from lenz.records import dataclass
from lenz.sym import Int, Sym, Var


@dataclass(frozen=True, slots=True)
class Native:
    """The text without the helpers, and facts for the loader.

    objects  the items of `self`, in order: a name of the runtime (a str), or a kind ("constant",
             "op", "names", "value") with its value
    slots    the index of each tensor in the list passed to `fail`
    sizes    the index of each size in the other list
    shims    functions of torch's library that it calls
    """

    text: str
    objects: tuple[object, ...]
    slots: Mapping[str, int]
    sizes: Mapping[Var, int]
    shims: tuple[str, ...]


def native(p: ir.Plan, layout: TorchLayout) -> Native:
    """The code of a plan. Raises NotNative."""
    f = Frame(layout)
    for s in (*p.inputs, *p.constants, *p.flat):
        if isinstance(s, ir.Input | ir.Alloc | ir.Alias | ir.Lay):
            f.types[s.name] = s.type
    take_arguments(f, p)
    devices = [s.device for s in p.flat if isinstance(s, ir.Current)]
    gpus = tuple(dict.fromkeys(kind_and_number(d)[1] for d in devices))
    graphs = [s.kernel for s in p.flat if isinstance(s, ir.LaunchStep) and s.graph]
    leaves = [f'call void @leave(ptr @"{name}")' for name in graphs[:1]]
    leave = "\n  ".join([*leaves, *["call void @restore(i32 %before)"] * bool(gpus)])
    if gpus:
        f.out.put(f"%before = call i32 @exchange(i32 {gpus[0]})")
    for number in gpus:
        f.out.put(f"%stream{number} = call ptr @stream_of(i32 {number})")
        f.out.put(f"%captured{number} = call i64 @captured(ptr %stream{number})")
    for c in p.constants:
        item = f.object(("constant", c.name))
        f.out.put(f"call void @Py_IncRef(ptr {item})")
        f.new(c.name, item).dtype = c.type.dtype
    for f.step, s in enumerate(p.flat):
        _step(f, s)
    _results(f, p, leave)
    code = f.out.function(len(f.slots), len(f.sizes), f.values, leave)
    constants = "\n".join(f.out.globals)
    numbers = {v: k for k, v in enumerate(f.sizes)}
    return Native(f"{constants}\n\n{code}\n", tuple(f.objects), f.slots, numbers, tuple(f.shims))


def on_gpu(p: ir.Plan) -> bool:
    """Whether a tensor that the plan names is on a GPU."""
    typed = (*p.inputs, *p.constants, *p.flat)
    types = [s.type for s in typed if isinstance(s, ir.Input | ir.Alloc | ir.Lay)]
    return any(t.device.startswith("cuda") for t in types)


def _step(f: Frame, s: ir.Step) -> None:
    match s:
        case ir.BindSize():
            if s.var not in f.sizes:
                f.bind(s.var, size_read(f, s))
        case ir.Alloc():
            _alloc(f, s)
        case ir.Keep():
            kept = f.inside(f.object(("constant", s.name)))
            f.succeed(f.out.let(f"call i32 @alias(ptr {kept}, ptr {f.slot(f.new(s.name))})"))
        case ir.Alias():
            _view(f, s)
        case ir.LaunchStep():
            _launch(f, s)
        case ir.CallStep():
            if not shim(f, s):
                _call(f, s)
        case ir.Lay():
            _lay(f, s)
        case ir.Free():
            f.drop(s.name)
        case ir.Check():
            f.succeed(f.out.let("load i64, ptr %status"), 64)
        case ir.Current():
            f.out.put(f"call i32 @exchange(i32 {kind_and_number(s.device)[1]})")


def _alloc(f: Frame, s: ir.Alloc) -> None:
    """New memory, or that of an argument which nothing else holds."""
    kind, number = kind_and_number(s.type.device)
    told = f"{f.layout_of(s.type)}, {tensor(s.type)}, i32 {int(kind == 'cuda')}, i32 {number}"
    done = _over(f, s) if s.over else ""
    b = f.buffers[s.name] if done else f.new(s.name)
    f.succeed(f.out.let(f"call i32 @empty(ptr %h, i64 {b.slot}, {told})"))
    slot = f.slot(NativeBuffer(b.slot)) if s.huge or s.zero else ""
    if s.huge:
        f.out.put(f"call void @advise(ptr {slot})")
    if s.zero:
        made = f.out.let(f"load ptr, ptr {slot}")
        f.succeed(f.out.let(f"call i32 @aoti_torch_zero_(ptr {made})"))
    if done:
        f.out.put(f"call void @wrapped(ptr %h, ptr %o, i64 {b.slot})")
        f.out.join(done)
    b.whole, b.dtype = True, s.type.dtype


def _over(f: Frame, s: ir.Alloc) -> str:
    """Take the memory of an argument if it is free, and go to the returned label."""
    given = [_value(f, a, "tuple") for a in (s.type.shape, s.type.layout.stride)]
    item = f.python(s.over)
    found = _vectorcall(f, f.object("over_called"), [(item, False), *given], 3, "null")
    b = f.new(s.name, found)
    none, _ = _value(f, None)
    done = f.out.label()
    f.out.branch(f.out.let(f"icmp ne ptr {found}, {none}"), done)
    f.out.put(f"call void @drop(ptr %o, i64 {b.slot})")
    return done


def _view(f: Frame, s: ir.Alias) -> None:
    """Another name for the memory of a buffer."""
    ends, source = isinstance(s, ir.Reuse), f.buffers[s.source]
    is_seen, is_taken = s.taker == "autograd", s.taker != "kernels"
    if s.same and (not s.detached or not is_seen):
        (_rename if ends else _share)(f, s)
    elif is_seen or (is_taken and source.dtype is not s.type.dtype):
        _seen(f, s)
    elif ends and source.whole and not is_taken:
        _rename(f, s)  # only kernels use it, by its address
    else:
        told = f"ptr {f.handle(s.source)}, {f.layout_of(s.type)}"
        b = f.new(s.name)
        b.dtype, b.whole = source.dtype, ends
        if ends:
            call = f"call i32 @reuse({told}, ptr {f.slot(b)})"
        else:
            offset = f.number(s.type.layout.offset)
            call = f"call i32 @view({told}, i64 {offset}, ptr {f.slot(b)})"
        f.succeed(f.out.let(call))
    if ends and s.source in f.buffers:
        f.drop(s.source)


def _rename(f: Frame, s: ir.Alias) -> None:
    f.buffers[s.name] = f.buffers.pop(s.source)
    f.slots[s.name] = f.buffers[s.name].slot


def _share(f: Frame, s: ir.Alias) -> None:
    """One tensor under two names, each dropped by itself."""
    b = f.buffers[s.source]
    found = f.out.let(f"load ptr, ptr {f.slot(b)}")
    if b.is_object:
        f.hold()
        f.out.put(f"call void @Py_IncRef(ptr {found})")
    other = f.new(s.name, found if b.is_object else "")
    other.data, other.dtype, other.whole = b.data, b.dtype, b.whole
    if not b.is_object:
        f.out.put(f"call i32 @aoti_torch_new_tensor_handle(ptr {found}, ptr {f.slot(other)})")


def _seen(f: Frame, s: ir.Alias) -> None:
    """The same in Python, which keeps autograd's data."""
    item, t = f.python(s.source), s.type
    if not s.same:
        layout = [_value(f, a, "tuple") for a in (t.shape, t.layout.stride)]
        if isinstance(s, ir.Reuse):
            name, last = "reuse", _value(f, Named("dtype", t.dtype.name))
        else:
            name, last = "view", _value(f, t.layout.offset)
        item = _vectorcall(f, f.object(name), [(item, False), *layout, last], 4, "null")
    if s.detached:
        item = _vectorcall(f, f.object("detach"), [(item, not s.same)], 1, "null")
    f.new(s.name, item).dtype = t.dtype


def _launch(f: Frame, s: ir.LaunchStep) -> None:
    """Run a kernel."""
    args = [f"ptr {f.data(a)}" for a in s.args] + [f"i64 {f.number(v)}" for v in s.sizes]
    if s.grid is None and s.device:
        raise NotNative(f"kernels on {s.device}")
    if s.grid is None:
        f.release()
        kinds = ", ".join(a.split()[0] for a in args)
        f.out.declare(s.kernel, f'declare i64 @"{s.kernel}"({kinds})')
        status = f.out.let(f'call i64 @"{s.kernel}"({", ".join(args)})')
        f.out.put(f"store i64 {status}, ptr %status")
        return
    f.out.declare(s.kernel, f'@"{s.kernel}" = external global i8')
    f.values = max(f.values, len(args))
    for k, a in enumerate(args):
        at = f.out.let(f"getelementptr i64, ptr %values, i64 {k}")
        f.out.put(f"store {a}, ptr {at}")
    number = kind_and_number(s.device)[1]
    told = f'ptr @"{s.kernel}", ptr %stream{number}, i64 {f.number(s.grid)}, ptr %values'
    if s.graph:
        f.hold()  # a replay changes the graph's launch record
    name, last = ("replay", "") if s.graph else ("launch", f", i64 %captured{number}")
    f.succeed(f.out.let(f"call i32 @{name}({told}, i64 {len(args)}{last})"))


def _call(f: Frame, s: ir.CallStep) -> None:
    """Call an eager op by its Python function."""
    keywords = tuple([k for k, _ in s.kwargs])
    given = [_value(f, a) for a in (*s.args, *(a for _, a in s.kwargs))]
    words = f.object(("names", keywords)) if keywords else "null"
    result = _vectorcall(f, f.object(("op", s.op)), given, len(s.args), words)
    for b in f.buffers.values() if s.writes or s.holds else ():
        b.data = ""  # the op may have given it other memory, as `resize_storage_bytes_` does
    if s.single and not s.into:
        _bind(f, s.outs[0], result)
        return
    if s.counted:
        rest = [(result, True), _value(f, len(s.outs)), _value(f, s.op)]
        result = _vectorcall(f, f.object("several"), rest, 3, "null")
    for k, o in enumerate(() if s.into else s.outs):
        if o is not None:
            part = f.out.let(f"call ptr @PySequence_GetItem(ptr {result}, i64 {k})")
            f.out.unless(f"icmp ne ptr {part}, null", "raised")
            _bind(f, o, part)
    f.out.put(f"call void @Py_DecRef(ptr {result})")


def _vectorcall(f: Frame, of: str, given: list[tuple[str, bool]], count: int, names: str) -> str:
    """Call a Python object; the result is owned."""
    f.hold()
    args = f.out.array([text for text, _ in given], "ptr")
    told = f"ptr {of}, ptr {args}, i64 {count}, ptr {names}"
    result = f.out.let(f"call ptr @PyObject_Vectorcall({told})")
    for text, is_new in given:
        if is_new:
            f.out.put(f"call void @Py_DecRef(ptr {text})")
    f.out.unless(f"icmp ne ptr {result}, null", "raised")
    return result


def _bind(f: Frame, o: str | Sym | None, item: str) -> None:
    """Name a result, which is owned."""
    if isinstance(o, Var):
        f.bind(o, f.out.let(f"call i64 @whole(ptr {item})"))
    if isinstance(o, str):
        f.new(o, item)
    elif isinstance(o, Var) and f"%{o.name}" not in f.buffers:
        f.new(f"%{o.name}", item)  # it may be a float, as an argument of calls
    else:  # nobody reads it, or another call has returned the same size
        f.out.put(f"call void @Py_DecRef(ptr {item})")


def _lay(f: Frame, s: ir.Lay) -> None:
    """Check a result, and copy it in Python if its strides differ."""
    t, out, b = s.type, f.out, f.buffers[s.name]
    kind, number = kind_and_number(t.device)
    was_released = f.released
    b.data, b.dtype, b.whole = "", t.dtype, False
    item, shown = out.let(f"load ptr, ptr {f.slot(b)}"), f.layout_of(t)
    differs, done = out.label(), out.label()
    if b.is_object:
        x = f.layout
        told = type_addresses(f, "type_tensor", "type_parameter")
        told += f", i64 {x.handle}, i64 {x.keys}, i64 {x.mask}"
        out.unless(f"call i1 @is_plain_object(ptr {item}, {told}, i64 {x.plain[kind]})", differs)
    handle = f.inside(item) if b.is_object else item
    tests = [f"call i1 @fits(ptr {handle}, {tensor(t)}, {shown})"]
    tests += [f"call i1 @is_aligned(ptr {handle})"] * s.aligned
    for test in tests:
        out.unless(test, differs)
    found = out.let(f"call i32 @index_of(ptr {handle})")
    out.branch(out.let(f"icmp eq i32 {found}, {number}"), done)
    out.join(differs)
    f.hold()
    if not b.is_object:
        item = out.let(f"call ptr @_Z16THPVariable_WrapRKN2at10TensorBaseE(ptr {handle})")
    rest: list[Atom] = [Named("dtype", t.dtype.name), number, s.op, s.aligned]
    given = [_value(f, a, "tuple") for a in (t.shape, t.layout.stride, *rest)]
    new = _vectorcall(f, f.object("lay"), [(item, not b.is_object), *given], 7, "null")
    slot = f.slot(b)
    if b.is_object:
        out.put(f"call void @drop(ptr %o, i64 {b.slot})")
        out.put(f"store ptr {new}, ptr {slot}")
    else:
        out.put(f"call void @delete(ptr %h, i64 {b.slot})")
        out.put(f"call i32 @aoti_torch_new_tensor_handle(ptr {f.inside(new)}, ptr {slot})")
        out.put(f"call void @Py_DecRef(ptr {new})")
    if was_released:
        f.release()
    out.join(done)


def _value(f: Frame, a: Atom, sequence: str = "list") -> tuple[str, bool]:
    """An argument of a call as a Python object, and whether the caller must release it."""
    f.hold()
    match a:
        case Ref():
            return f.python(a.name), False
        case Var(name=name) if f"%{name}" in f.buffers:
            return f.python(f"%{name}"), False
        case Sym() if not isinstance(a, Int):
            return f.out.let(f"call ptr @PyLong_FromLongLong(i64 {f.number(a)})"), True
        case tuple() if not _is_known(a):
            kind = "List" if sequence == "list" else "Tuple"
            items = [_owned(f, *_value(f, x, sequence)) for x in a]
            made = f.out.let(f"call ptr @Py{kind}_New(i64 {len(a)})")
            for k, item in enumerate(items):
                f.out.put(f"call i32 @Py{kind}_SetItem(ptr {made}, i64 {k}, ptr {item})")
            return made, True
        case _:
            # The text distinguishes 1 from True, and 0.0 from -0.0.
            return f.object(("value", a, sequence, repr(a))), False


def _owned(f: Frame, item: str, is_new: bool) -> str:
    """The object, with a reference that the caller owns."""
    if not is_new:
        f.out.put(f"call void @Py_IncRef(ptr {item})")
    return item


def _is_known(a: Atom) -> bool:
    """True for a value that is the same in each call."""
    if isinstance(a, tuple):
        return all(map(_is_known, a))
    return not isinstance(a, Ref) and (not isinstance(a, Sym) or isinstance(a, Int))


def _results(f: Frame, p: ir.Plan, leave: str) -> None:
    """Make the tuple of results, and drop the rest."""
    items = [_owned(f, *_value(f, a)) for a in p.outputs]
    f.hold()
    made = f.out.let(f"call ptr @PyTuple_New(i64 {len(items)})")
    for k, item in enumerate(items):
        f.out.put(f"call i32 @PyTuple_SetItem(ptr {made}, i64 {k}, ptr {item})")
    for name in [*f.buffers]:
        f.drop(name)
    if leave:
        f.out.put(leave)
    f.out.put(f"ret ptr {made}")
