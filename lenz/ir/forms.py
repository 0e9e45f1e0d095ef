"""The kinds of fields, and the text of every class that has a `SYNTAX`; see syntax.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, get_args

from lenz.ir import graph, kernel, lexer, plan, text
from lenz.ir.expr import ref
from lenz.ir.form import CULPRIT, Kind, Made, TextForm, TextLines
from lenz.ir.lexer import Cursor
from lenz.ir.syntax import Slot
from lenz.ir.tensor import Axis, Buffer
from lenz.ir.text import Scope
from lenz.ir.text_expr import LINE, block_of, gathered, show_block, show_bound, show_expr, value_of
from lenz.sym import Sym, Var
from lenz.sym import show as show_sym


def _choice(words: Any, what: str, grammar: str) -> Kind:
    """One of the words of a `Literal`."""
    table = tuple(filter(None, get_args(words)))
    return Kind(lambda v, s: str(v), lambda c, s: lexer.choice_of(c, table, what), grammar)


def _pair(first: Kind, second: Kind) -> Kind:
    """`a: b`."""

    def read(c: Cursor, s: Scope) -> tuple[Any, Any]:
        a = first.read(c, s)
        c.expect(":")
        return a, second.read(c, s)

    grammar = f'{first.grammar} ":" {second.grammar}'
    return Kind(lambda v, s: f"{first.show(v[0], s)}: {second.show(v[1], s)}", read, grammar)


# Results and arguments of calls.


def _result(o: Any, s: Scope) -> str:
    """One result of a node: a buffer with its type, a size, or none."""
    if isinstance(o, Buffer):
        mark = "out " if o.name in s.outputs else ""
        return f"{mark}{text.show_buffer(o.name)} = {text.show_type(o.type, s)}"
    return _out(o, s)


def _result_of(c: Cursor, s: Scope) -> Buffer | Sym | None:
    is_out = c.accept("out")
    if c.text != "%":
        return None if c.accept("none") else lexer.sym_of(c, s.vars)
    name = lexer.buffer_of(c)
    c.expect("=")
    if is_out:
        s.outputs[name] = None
    return Buffer(name, text.type_of(c, s))


def _out(o: Any, s: Scope) -> str:
    """One result of a step of a plan."""
    return "none" if o is None else text.show_buffer(o) if isinstance(o, str) else show_sym(o)


def _out_of(c: Cursor, s: Scope) -> str | Sym | None:
    if c.text == "%":
        return lexer.buffer_of(c)
    return None if c.accept("none") else lexer.sym_of(c, s.vars)


def _results(show: Callable[[Any, Scope], str], read: Callable[..., Any], grammar: str) -> Kind:
    """`x` for an op that returns one value, `(x, y)` for one that returns a tuple."""

    def shown(n: Any, s: Scope, slot: Slot) -> str:
        outs = [show(o, s) for o in n.outs]
        if len(outs) == 1:
            return outs[0] if n.single else f"({outs[0]},)"
        return f"({', '.join(outs)})"

    def given(c: Cursor, s: Scope, made: Made, slot: Slot | None = None) -> None:
        made["single"] = not c.accept("(")
        single = made["single"]
        made["outs"] = (read(c, s),) if single else tuple(lexer.list_of(c, lambda: read(c, s), ")"))

    return Kind(shown, given, f'({grammar} | "(" {grammar},* ")")', whole=True)


def _single(n: Any, s: Scope, slot: Slot) -> str:
    return " single" if n.single and len(n.outs) != 1 else ""


def _single_of(c: Cursor, s: Scope, made: Made, slot: Slot) -> None:
    made["single"] = c.accept("single") or made["single"]


def _args(n: Any, s: Scope, slot: Slot) -> str:
    named = [f"{k}={text.show_atom(a)}" for k, a in n.kwargs]
    return ", ".join([text.show_atom(a) for a in n.args] + named)


def _args_of(c: Cursor, s: Scope, made: Made, slot: Slot) -> None:
    args: list[graph.Atom] = []
    kwargs: list[tuple[str, graph.Atom]] = []

    def one() -> None:
        if c.kind == "word" and c.words[c.place + 1] == "=":
            name = c.take()
            c.expect("=")
            kwargs.append((name, text.atom_of(c, s)))
        else:
            args.append(text.atom_of(c, s))

    lexer.items_of(c, one, ")")
    made.update(args=tuple(args), kwargs=tuple(kwargs))


# Loops and their bodies.


def _axes_of(c: Cursor, s: Scope) -> tuple[Axis, ...]:
    axes = tuple(lexer.items_of(c, lambda: text.axis_of(c, s), ")", "|"))
    s.vars.update((a.name, a.var) for a in axes)
    return axes


def _loop_of(c: Cursor, s: Scope) -> Axis:
    a = text.axis_of(c, s, "in")
    s.vars[a.name] = a.var
    return a


def _along_of(c: Cursor, s: Scope, made: Made, slot: Slot) -> None:
    names = tuple(a.name for a in made["axes"])
    made["dim"] = names.index(lexer.choice_of(c, names, "an axis"))


def _loop_var(c: Cursor, s: Scope) -> Var:
    if c.text not in s.vars:
        raise c.error(f"`{c.text}` is no loop around this")
    return s.vars[c.take()]


def _loop_vars_of(c: Cursor, s: Scope) -> tuple[Var, ...]:
    if c.accept("none"):
        return ()
    found = [_loop_var(c, s)]
    while c.accept(","):
        found.append(_loop_var(c, s))
    return tuple(found)


def _stmts(body: tuple[Any, ...], s: Scope) -> str:
    outer = s.indent
    s.indent = outer + "  "
    rows = [f"{s.indent}{_stmt(x, s)}\n" for x in body]
    s.indent = outer
    return "{\n" + "".join(rows) + outer + "}"


def _stmt(x: Any, s: Scope) -> str:
    """One statement; a loop around a single simple statement is on one line if it fits."""
    shown = FORMS[type(x)].show(x, s)
    is_short = isinstance(x, kernel.For) and shown.count("\n") == 2
    if is_short and not isinstance(x.body[0], kernel.For):
        head, inner, _ = shown.split("\n")
        line = f"{head} {inner.strip()} }}"
        if len(line) - line.count(CULPRIT) <= LINE:
            return line
    return shown


def _stmts_of(c: Cursor, s: Scope) -> tuple[Any, ...]:
    found: list[Any] = []
    c.expect("{")
    while not c.accept("}"):
        found.append(_stmt_of(c, s))
        c.accept(";")
    return tuple(found)


def _stmt_of(c: Cursor, s: Scope) -> Any:
    form = STMTS.get(c.text) if c.text != "local" else FORMS[kernel.Local]
    if form is not None and form.lead == 0:
        return form.read(c, s)
    name = lexer.name_of(c)
    c.expect("=")
    return STMTS.get(c.text, STMTS[""]).read(c, s, {"name": name})


# The head of a kernel: the sizes used by parameters come after them.


def _params_of(c: Cursor, s: Scope, made: Made, slot: Slot) -> None:
    made["params"] = c.place
    c.skip_to(";", ")")


def _sizes(k: kernel.Kernel, s: Scope, slot: Slot) -> str:
    return "; " + ", ".join([text.show_size(v) for v in k.sizes]) if k.sizes else ""


def _sizes_of(c: Cursor, s: Scope, made: Made, slot: Slot) -> None:
    sizes: list[Var] = []
    if c.accept(";"):
        sizes = lexer.items_of(c, lambda: text.size_of(c, s), ")")
    end = c.place
    c.jump(made["params"])
    params = lexer.items_of(c, lambda: FORMS[kernel.Param].read(c, s), ")", ";")
    c.jump(end)
    made.update(params=tuple(params), sizes=tuple(sizes))


_TILE = tuple(asdict(kernel.TileConfig()).items())


def _tile(t: kernel.TileConfig, s: Scope) -> str:
    return ", ".join([f"{k}: {getattr(t, k)!r}" for k, usual in _TILE if getattr(t, k) != usual])


def _tile_of(c: Cursor, s: Scope) -> kernel.TileConfig:
    found: dict[str, Any] = {}

    def one() -> None:
        name = lexer.choice_of(c, dict(_TILE), "a number of the tile")
        c.expect(":")
        found[name] = text.number_of(c)

    lexer.items_of(c, one, ")")
    return kernel.TileConfig(**found)


def _body_of(c: Cursor, s: Scope, made: Made, slot: Slot) -> None:
    found = _stmts_of(c, s)
    made["locals"] = tuple([x for x in found if isinstance(x, kernel.Local)])
    made["body"] = tuple([x for x in found if not isinstance(x, kernel.Local)])


# Parts of a value: its place, and its finish.


def _place(n: Any, s: Scope, slot: Slot) -> str:
    where = slot.get(n)
    return ", ".join([show_sym(x) for x in where]) if slot.is_list else show_sym(where)


def _place_of(c: Cursor, s: Scope, made: Made, slot: Slot) -> None:
    made[slot.field] = c.place  # `_bound_of` reads it: the bounds of its operands follow
    c.skip_to("]")


def _bound(n: Any, s: Scope, slot: Slot) -> str:
    if not n.bound:
        return ""
    where = getattr(n, slot.usual)
    where = (where,) if isinstance(where, Sym) else where
    return show_bound(where, [show_expr(e, s.types, s.indent) for e in n.bound])


def _bound_of(c: Cursor, s: Scope, made: Made, slot: Slot) -> None:
    where, made["bound"] = gathered(c, s, {}, made[slot.usual], slot.is_list)
    made[slot.usual] = where if slot.is_list else where[0]


def _finish(n: Any, s: Scope, slot: Slot) -> str:
    acc = graph.acc_dtype(n.kind, n.body.dtype)
    if n.finish is ref("acc", acc):
        return ""
    return " finish " + show_block(n.finish, {**s.types, "acc": acc}, s.indent)


def _finish_of(c: Cursor, s: Scope, made: Made, slot: Slot) -> None:
    acc = graph.acc_dtype(made["kind"], made["body"].dtype)
    made["finish"] = ref("acc", acc)
    if c.accept("finish"):
        s.types = {**s.types, "acc": acc}
        made["finish"] = block_of(c, s)


def node_of(c: Cursor, s: Scope) -> Any:
    """One node of a graph; its results marked `out` are added to `s.outputs`."""
    made: Made = {}
    KINDS["results"].read(c, s, made)
    c.expect(":")
    form = NODES[lexer.choice_of(c, NODES, "a kind of node")]
    if form.cls is not graph.Extern:
        out = made["outs"][0] if made["single"] else None
        if not isinstance(out, Buffer):
            raise c.error(f"`{form.word}` gives one buffer")
        made = {"out": out}
    c.jump(c.place - 1)
    return _defined(form.read(c, s, made), s)


def _node(n: graph.Node, s: Scope) -> str:
    shown = FORMS[type(n)].show(n, s)
    _defined(n, s)
    return shown


def _defined(n: graph.Node, s: Scope) -> graph.Node:
    s.types.update([("%" + b.name, b.dtype) for b in graph.outs_of(n)])
    return n


def _given(b: Buffer | Sym, s: Scope) -> str:
    return _show(b if isinstance(b, Buffer) else plan.SizeInput(b), s)


def _given_of(c: Cursor, s: Scope) -> Any:
    return FORMS[Buffer].read(c, s) if c.text == "%" else FORMS[plan.SizeInput].read(c, s).value


def _input_of(c: Cursor, s: Scope) -> Any:
    return FORMS[plan.Input if c.text == "%" else plan.SizeInput].read(c, s)


def _show(x: Any, s: Scope) -> str:
    return FORMS[type(x)].show(x, s)


def _step_of(c: Cursor, s: Scope) -> Any:
    return STEPS[c.text].read(c, s)


def _steps_of(c: Cursor, s: Scope) -> tuple[Any, ...]:
    found, words = list[Any](), [w for w, f in STEPS.items() if f.cls is not plan.Region]
    c.expect("{")
    while not c.accept("}"):
        lexer.choice_of(c, tuple(words), "a step")
        c.jump(c.place - 1)
        found.append(_step_of(c, s))
    return tuple(found)


def _node_kind(grammar: str, cls: Any) -> Kind:
    return Kind(_show, lambda c, s: FORMS[cls].read(c, s), grammar)


def _launched_of(c: Cursor, s: Scope) -> Any:
    quoted = c.kind == "string"
    return s.kernels[lexer.string_of(c) if quoted else lexer.choice_of(c, s.kernels, "a kernel")]


def _symbol_of(c: Cursor, s: Scope) -> str:
    c.expect("@")
    return lexer.name_of(c)


_NAME = Kind(lambda v, s: text.show_name(v), lambda c, s: lexer.name_of(c), "NAME")
_BUFFER = Kind(lambda v, s: text.show_buffer(v), lambda c, s: lexer.buffer_of(c), '"%" NAME')
_SYM = Kind(lambda v, s: show_sym(v), lambda c, s: lexer.sym_of(c, s.vars), "sym")
_INT = Kind(lambda v, s: str(v), lambda c, s: lexer.int_of(c), "INT")

KINDS: Mapping[str, Kind] = {
    # names
    "name": _NAME,
    "symbol": Kind(lambda v, s: "@" + text.show_name(v), _symbol_of, '"@" NAME'),
    "kernel": Kind(lambda v, s: text.show_name(v.name), _launched_of, "NAME"),
    "word": Kind(lambda v, s: text.show_word(v), lambda c, s: lexer.word_of(c), "WORD"),
    "string": Kind(lambda v, s: json.dumps(v), lambda c, s: lexer.string_of(c), "STRING"),
    "int": _INT,
    "number": _pair(_NAME, _INT),
    # buffers
    **dict.fromkeys(("def", "use", "share", "over", "take", "end", "writes"), _BUFFER),
    "alias": _pair(_INT, _BUFFER),
    "type": Kind(text.show_type, text.type_of, "type"),
    "maybe": Kind(
        lambda v, s: "none" if v is None else text.show_type(v, s),
        lambda c, s: None if c.accept("none") else text.type_of(c, s),
        '("none" | type)',
    ),
    "dtype": Kind(lambda v, s: str(v.name), lambda c, s: text.dtype_of(c), "DTYPE"),
    # sizes and loops
    "sym": _SYM,
    "index": _SYM,
    "size": Kind(lambda v, s: str(v.name), text.var_of, "NAME"),
    "axes": Kind(lambda v, s: ", ".join([text.show_axis(a) for a in v]), _axes_of, "axis,*"),
    "along": Kind(lambda n, s, slot: str(n.axes[n.dim].name), _along_of, "NAME", whole=True),
    "loop": Kind(lambda v, s: text.show_axis(v, " in "), _loop_of, 'NAME ["as" range] "in" extent'),
    "loop_var": Kind(lambda v, s: str(v.name), _loop_var, "NAME"),
    "loop_vars": Kind(
        lambda v, s: ", ".join([x.name for x in v]) or "none", _loop_vars_of, '("none" | NAME,*)'
    ),
    "stmts": Kind(_stmts, _stmts_of, '"{" stmt* "}"'),
    # values
    "value": Kind(
        lambda v, s: show_expr(v, s.types, s.indent), lambda c, s: value_of(c, s, {}), "value"
    ),
    "block": Kind(lambda v, s: show_block(v, s.types, s.indent), block_of, "block"),
    "finish": Kind(_finish, _finish_of, '["finish" block]', whole=True),
    "place": Kind(_place, _place_of, "sym,*", whole=True),
    "bound": Kind(_bound, _bound_of, "[gather]", whole=True),
    # calls
    "result": Kind(_result, _result_of, "result"),
    "results": _results(_result, _result_of, "result"),
    "outs": _results(_out, _out_of, "out"),
    "args": Kind(_args, _args_of, "arg,*", whole=True),
    "single": Kind(_single, _single_of, '["single"]', whole=True),
    "atom": Kind(lambda v, s: text.show_atom(v), text.atom_of, "atom"),
    # heads and bodies of kernels
    "params": Kind(
        lambda k, s, slot: ", ".join([_show(p, s) for p in k.params]), _params_of, "param,*", True
    ),
    "sizes": Kind(_sizes, _sizes_of, '[";" size,*]', whole=True),
    "tile": Kind(_tile, _tile_of, '(NAME ":" NUMBER),*'),
    "kernel_body": Kind(
        lambda k, s, slot: _stmts((*k.locals, *k.body), s), _body_of, '"{" local* stmt* "}"', True
    ),
    # nodes, and lines of a graph or plan
    "look_back": _node_kind("look_back", kernel.LookBack),
    "buffer": _node_kind("buffer", Buffer),
    "mutation": _node_kind("mutation", graph.Mutation),
    "tensor": _node_kind("buffer", plan.Input),
    "given": Kind(_given, _given_of, '(buffer | sym ":" "size")'),
    "input": Kind(_show, _input_of, '(buffer | sym ":" "size")'),
    "node": Kind(_node, node_of, "node"),
    "step": Kind(_show, _step_of, "step"),
    "steps": Kind(_stmts, _steps_of, '"{" step* "}"'),
    # one of some words
    "reduction": _choice(graph.ReduceKind, "a kind of reduction", "RKIND"),
    "scan": _choice(graph.ScanKind, "a kind of scan", "SKIND"),
    "draws": _choice(graph.Draws, "what is drawn", '("key" | "numbers")'),
    "region": _choice(plan.RegionKind, "a kind of region", '("graph" | "outside")'),
    "taker": _choice(plan.Taker, "who takes it", '("kernels" | "calls" | "autograd")'),
    "update": _choice(graph.UpdateMode, "a mode of update", "MODE"),
    "loop_kind": _choice(kernel.LoopKind, "a kind of loop", "LKIND"),
    "kernel_kind": _choice(kernel.KernelKind, "a kind of kernel", "KKIND"),
    "mode": _choice(kernel.Mode, "a mode", '("in" | "out" | "inout" | "work")'),
    "which": Kind(
        lambda v, s: "stride" if v else "size",
        lambda c, s: lexer.choice_of(c, ("size", "stride"), "what it is") == "stride",
        '("size" | "stride")',
    ),
}

_CLASSES = (
    *get_args(graph.Node), *get_args(kernel.Stmt), *get_args(plan.Step),
    plan.Region, Buffer, graph.Mutation, plan.Input, plan.SizeInput,
    kernel.Kernel, kernel.Param, kernel.Local, kernel.LookBack, kernel.Launch, kernel.Rejected,
)  # fmt: skip
FORMS: Mapping[Any, TextForm] = {x: TextForm(x, KINDS) for x in _CLASSES}
NODES, STMTS, STEPS = [
    {FORMS[x].word: FORMS[x] for x in get_args(union)}
    for union in (graph.Node, kernel.Stmt, plan.Step | plan.Region)
]
GRAPH = TextLines(graph.Graph, KINDS, {"mutation": ("mutate",)})
PLAN = TextLines(plan.Plan, KINDS, {"step": tuple(STEPS)})
