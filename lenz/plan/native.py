"""A plan as native code: one function in LLVM's text, which CPython calls as a method.

`call(self, args)` takes the list of arguments, as the function of `plan/python.py` does. It checks
them, allocates, launches kernels and calls eager ops, with no Python in between but those ops. What
it does not expect, such as an argument with other strides, it leaves to the Python function: that
one copies, compiles a fallback or raises. `self` is a tuple of the Python objects that it needs.

Tensors are handles of libtorch's C shim. That of a Python tensor lies inside of its object, at a
place that `runtime/native.py` finds out. Kernels run without the GIL, and ops with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lenz.ir.graph import Atom, Named, Ref
from lenz.ir.plan import (
    Alloc,
    BindSize,
    CallStep,
    Check,
    Current,
    Free,
    Input,
    LaunchStep,
    Lay,
    Plan,
    Reuse,
    Step,
    ViewStep,
)  # fmt: skip
from lenz.plan.native_args import arguments
from lenz.plan.native_frame import Frame, Layout, Refused
from lenz.plan.native_text import CODES, HELPERS
from lenz.sym import Int, Sym


@dataclass(frozen=True, slots=True)
class Native:
    """The text, and what `self` holds, in order.

    That is a name of the runtime (a str), or a kind ("constant", "op", "names", "value") with what
    is of that kind.
    """

    text: str
    objects: tuple[object, ...]


def native(p: Plan, layout: Layout, mutates: Callable[[str], bool]) -> Native:
    """The code of a plan; `mutates` says whether an op may write. Raises Refused."""
    if p.objects or any(i.type.device != "cpu" for i in p.inputs if isinstance(i, Input)):
        raise Refused("objects, or tensors of another device")
    f = Frame(layout)
    arguments(f, p)
    for c in p.constants:
        item = f.object(("constant", c.name))
        f.out.put(f"call void @Py_IncRef(ptr {item})")
        f.new(c.name, item)
    visible = seen(p, mutates) | _reused(p)
    for s in p.steps:
        _step(f, s, visible)
    _results(f, p)
    constants = "\n".join(f.out.globals)
    return Native(f"{HELPERS}\n{constants}\n\n{f.out.function()}\n", tuple(f.objects))


def _step(f: Frame, s: Step, visible: frozenset[str]) -> None:
    match s:
        case BindSize():
            if s.var not in f.sizes:
                which = "strides" if s.stride else "sizes"
                read = f"call i64 @read_{which}(ptr {f.handle(s.source)}, i64 {s.dim})"
                f.sizes[s.var] = f.out.let(read)
        case Alloc():
            _alloc(f, s)
        case Reuse() | ViewStep():
            _view(f, s, s.name in visible)
        case LaunchStep():
            _launch(f, s)
        case CallStep():
            _call(f, s)
        case Lay():
            _lay(f, s)
        case Free():
            f.drop(s.name)
        case Check():
            failed = f.out.let("load i64, ptr %failed")
            f.require(f"icmp eq i64 {failed}, 0", "check")
        case Current():
            raise Refused("a GPU")


def _alloc(f: Frame, s: Alloc) -> None:
    """New memory."""
    t = s.type
    if t.device != "cpu" or s.over:
        raise Refused("memory of another device, or of an argument")
    told = f"{f.layout_of(t.shape, t.layout.stride)}, i32 {CODES[t.dtype.name]}"
    b = f.new(s.name)
    slot = f.slot(b)
    b.data = f.out.let(f"call ptr @empty(ptr {slot}, {told}, i1 {int(s.huge)}, i1 {int(s.zero)})")
    f.require(f"icmp ne ptr {f.out.let(f'load ptr, ptr {slot}')}, null", "error")


def _view(f: Frame, s: Reuse | ViewStep, is_seen: bool) -> None:
    """The memory of another buffer, under another name; autograd knows of it if it `is_seen`."""
    ends = isinstance(s, Reuse)
    if s.same and (not s.detached or not is_seen):
        if ends:
            f.buffers[s.name] = f.buffers.pop(s.source)
        else:
            f.share(s.source, s.name)
    elif is_seen:
        _seen(f, s)
    else:
        source, offset = f.handle(s.source), "0"
        if not ends:
            own = f.out.let(f"call i64 @offset_of(ptr {source})")
            offset = f.out.let(f"add i64 {own}, {f.number(s.type.layout.offset)}")
        told = f"{f.layout_of(s.type.shape, s.type.layout.stride)}, i64 {offset}"
        slot = f.slot(f.new(s.name))
        made = f"call i32 @aoti_torch__reinterpret_tensor(ptr {source}, {told}, ptr {slot})"
        f.require(f"icmp eq i32 {f.out.let(made)}, 0", "error")
    if ends and s.source in f.buffers:
        f.drop(s.source)


def _seen(f: Frame, s: Reuse | ViewStep) -> None:
    """The same by Python, which keeps what autograd knows."""
    item, t = f.python(s.source), s.type
    if not s.same:
        layout = [_value(f, a, "tuple") for a in (t.shape, t.layout.stride)]
        if isinstance(s, Reuse):
            name, last = "reuse", _value(f, Named("dtype", t.dtype.name))
        else:
            name, last = "view", _value(f, t.layout.offset)
        item = _vectorcall(f, f.object(name), [(item, False), *layout, last], 4, "null")
    if s.detached:
        item = _vectorcall(f, f.object("detach"), [(item, not s.same)], 1, "null")
    f.new(s.name, item)


def seen(p: Plan, mutates: Callable[[str], bool]) -> frozenset[str]:
    """The buffers that leave the plan or are written by an op, and all that they are views of.

    Of these, autograd's relations and versions must be as the Python function makes them.
    """
    found = {name for a in p.outputs for name in _names(a)}
    for s in reversed(p.steps):
        if isinstance(s, CallStep) and not s.into and mutates(s.op):
            found |= {name for a in (*s.args, *(a for _, a in s.kwargs)) for name in _names(a)}
    for s in reversed(p.steps):
        if isinstance(s, (Reuse, ViewStep)) and s.name in found:
            found.add(s.source)
    return frozenset(found)


def _reused(p: Plan) -> set[str]:
    """Buffers in the memory of others, of another type perhaps, that ops take."""
    calls = [s for s in p.steps if isinstance(s, CallStep)]
    taken = {n for s in calls for a in (*s.args, *(a for _, a in s.kwargs)) for n in _names(a)}
    return {s.name for s in p.steps if isinstance(s, Reuse) and s.name in taken}


def _names(a: Atom) -> list[str]:
    if isinstance(a, tuple):
        return [name for x in a for name in _names(x)]
    return [a.name] if isinstance(a, Ref) else []


def _launch(f: Frame, s: LaunchStep) -> None:
    """Run a kernel of the CPU."""
    if s.grid is not None:
        raise Refused("a GPU")
    args = [f"ptr {f.data(a)}" for a in s.args] + [f"i64 {f.number(v)}" for v in s.sizes]
    f.release()
    f.out.declare(s.kernel, len(s.args), len(s.sizes))
    failed = f.out.let(f'call i64 @"{s.kernel}"({", ".join(args)})')
    f.out.put(f"store i64 {failed}, ptr %failed")


def _call(f: Frame, s: CallStep) -> None:
    """Call an eager op by its Python function."""
    if s.counted:
        raise Refused("results that are counted")
    names = tuple([k for k, _ in s.kwargs])
    given = [_value(f, a) for a in (*s.args, *(a for _, a in s.kwargs))]
    words = f.object(("names", names)) if names else "null"
    result = _vectorcall(f, f.object(("op", s.op)), given, len(s.args), words)
    if s.single and not s.into:
        _bind(f, s.outs[0], result)
        return
    for k, o in enumerate(() if s.into else s.outs):
        if o is not None:
            part = f.out.let(f"call ptr @PySequence_GetItem(ptr {result}, i64 {k})")
            f.require(f"icmp ne ptr {part}, null", "raised")
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
    f.require(f"icmp ne ptr {result}, null", "raised")
    return result


def _bind(f: Frame, o: str | Sym | None, item: str) -> None:
    """Name a result, which is owned."""
    if isinstance(o, str):
        f.new(o, item)
    elif o is None:
        f.out.put(f"call void @Py_DecRef(ptr {item})")
    else:
        raise Refused("a result that is a size")


def _lay(f: Frame, s: Lay) -> None:
    """Check a result, and have Python copy it if its strides are others."""
    t, x, out = s.type, f.layout, f.out
    if t.device != "cpu" or s.aligned:
        raise Refused("a GPU")
    item = f.python(s.name)
    b = f.buffers[s.name]
    b.data = ""
    plain = f"i64 {x.keys}, i64 {x.mask}, i64 {x.plain}, i32 {CODES[t.dtype.name]}"
    told = f"i64 {x.types[0]}, i64 {x.types[1]}, i64 {x.handle}, {plain}"
    f.hold()
    shown = f.layout_of(t.shape, t.layout.stride)
    good = out.let(f"call i1 @is_laid(ptr {item}, {told}, {shown})")
    fast, done = out.label(), out.label()
    sizes = [_value(f, a, "tuple") for a in (t.shape, t.layout.stride)]
    out.branch(good, fast)
    rest: list[Atom] = [Named("dtype", t.dtype.name), -1, s.op]
    given = [(item, False), *sizes, *(_value(f, a) for a in rest)]
    new = _vectorcall(f, f.object("lay"), given, 6, "null")
    slot = f.slot(b)
    out.put(f"call void @drop(ptr {slot})")
    out.put(f"store ptr {new}, ptr {slot}")
    out.put(f"br label %{done}")
    out.lines.append(f"{fast}:")
    for text, is_new in sizes:
        if is_new:
            out.put(f"call void @Py_DecRef(ptr {text})")
    out.join(done)


def _value(f: Frame, a: Atom, sequence: str = "list") -> tuple[str, bool]:
    """An argument of a call as a Python object, and whether the caller must drop it."""
    f.hold()
    match a:
        case Ref():
            return f.python(a.name), False
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
            # The text tells 1 from True, and 0.0 from -0.0.
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


def _results(f: Frame, p: Plan) -> None:
    """Make the tuple of results, and drop what is left."""
    items = [_owned(f, *_value(f, a)) for a in p.outputs]
    f.hold()
    made = f.out.let(f"call ptr @PyTuple_New(i64 {len(items)})")
    for k, item in enumerate(items):
        f.out.put(f"call i32 @PyTuple_SetItem(ptr {made}, i64 {k}, ptr {item})")
    for name in [*f.buffers]:
        f.drop(name)
    f.out.put(f"ret ptr {made}")
