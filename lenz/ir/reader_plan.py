"""Reading plans; see reader.py."""

from __future__ import annotations

from lenz.ir.graph import Atom
from lenz.ir.lexer import (
    Cursor,
    buffer_of,
    choice_of,
    enclosed,
    int_of,
    list_of,
    name_of,
    numbers_of,
    sym_of,
    tuple_of,
    word_of,
)
from lenz.ir.plan import (
    Alloc,
    BindSize,
    CallStep,
    Check,
    Free,
    Input,
    LaunchStep,
    Lay,
    Plan,
    Reuse,
    SizeInput,
    Step,
    ViewStep,
)
from lenz.ir.reader_expr import Scope, atom_of, call_args, header_of, held_of, type_of
from lenz.ir.tensor import TensorType
from lenz.sym import Sym

_LINES = (
    "in", "const", "object", "bind", "alloc", "reuse", "view", "launch", "call", "lay", "free",
    "check", "kernels", "aligned", "most", "return",
)  # fmt: skip


def plan_of(c: Cursor) -> Plan:
    """A plan, from its name on."""
    name, _, s = header_of(c)
    inputs: list[Input | SizeInput] = []
    constants: list[Input] = []
    objects: list[str] = []
    steps: list[Step] = []
    outputs: tuple[Atom, ...] = ()
    kernels: tuple[str, ...] | None = None
    aligned: tuple[str, ...] = ()
    most: tuple[tuple[str, int], ...] = ()
    while not c.accept("}"):
        match choice_of(c, _LINES, "a line of a plan"):
            case "in" if c.text == "%":
                inputs.append(Input(*_tensor(c, s)))
            case "in":
                inputs.append(SizeInput(sym_of(c, s.vars)))
                c.expect(":", "size")
            case "const":
                constants.append(Input(*_tensor(c, s)))
            case "object":
                objects.append(name_of(c))
            case "kernels":
                kernels = tuple_of(c, lambda: _kernel(c))
            case "aligned":
                aligned = tuple_of(c, lambda: buffer_of(c))
            case "most":
                most = numbers_of(c)
            case "return":
                outputs = tuple_of(c, lambda: atom_of(c, s))
            case word:
                steps.append(_step(c, s, word))
    if kernels is None:
        kernels = tuple(dict.fromkeys(x.kernel for x in steps if isinstance(x, LaunchStep)))
    made = tuple(inputs), tuple(constants), tuple(steps), outputs, kernels, tuple(objects)
    return Plan(name, *made, aligned=aligned, most=most)


def _kernel(c: Cursor) -> str:
    c.expect("@")
    return name_of(c)


def _tensor(c: Cursor, s: Scope) -> tuple[str, TensorType]:
    name = buffer_of(c)
    c.expect(":")
    return name, type_of(c, s)


def _step(c: Cursor, s: Scope, word: str) -> Step:
    match word:
        case "bind":
            var = s.vars[choice_of(c, s.vars, "a size")]
            c.expect("=")
            what = choice_of(c, ("size", "stride"), "what it is")
            c.expect("(")
            source = buffer_of(c)
            c.expect(",")
            dim = int_of(c)
            c.expect(")")
            factor = int_of(c) if c.accept("by") else 1
            return BindSize(var, source, dim, what == "stride", factor)
        case "alloc":
            name, type_ = _tensor(c, s)
            zero = c.accept("zero")
            return Alloc(name, type_, zero, buffer_of(c) if c.accept("over") else "")
        case "lay":
            return Lay(*_tensor(c, s))
        case "reuse" | "view":
            name, type_ = _tensor(c, s)
            c.expect("of")
            source = buffer_of(c)
            if word == "reuse":
                return Reuse(name, source, type_)
            return ViewStep(name, source, type_, c.accept("detached"))
        case "launch":
            kernel = _kernel(c)
            c.expect("(")
            args = tuple(list_of(c, lambda: buffer_of(c), ")", (";",)))
            sizes: tuple[Sym, ...] = ()
            if c.accept(";"):
                sizes = tuple(list_of(c, lambda: sym_of(c, s.vars), ")"))
            else:
                c.expect(")")
            if not c.accept("on"):
                return LaunchStep(kernel, args, sizes)
            device = word_of(c)
            c.expect("grid")
            return LaunchStep(kernel, args, sizes, enclosed(c, lambda: sym_of(c, s.vars)), device)
        case "call":
            return _call(c, s)
        case "check":
            return Check()
        case _:
            return Free(buffer_of(c))


def _call(c: Cursor, s: Scope) -> CallStep:
    outs: tuple[str | Sym | None, ...]
    single = not c.accept("(")
    if single:
        outs = (_out(c, s),)
    else:
        outs = tuple(list_of(c, lambda: _out(c, s), ")"))
    c.expect("=")
    op = word_of(c)
    args, kwargs = call_args(c, s)
    single = c.accept("single") or single
    return CallStep(op, args, kwargs, outs, single, c.accept("into"), *held_of(c))


def _out(c: Cursor, s: Scope) -> str | Sym | None:
    if c.text == "%":
        return buffer_of(c)
    return None if c.accept("none") else sym_of(c, s.vars)
