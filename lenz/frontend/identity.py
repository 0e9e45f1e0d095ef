"""A program as text: programs with equal text compile to equal code.

The text holds everything that a later stage reads: calls and arguments; types, layouts and aliases
of all values; the expression, range and example of each size.  It omits the program's name and the
user's source lines, which only comments show. It omits the elements of constants: a plan gets them
when it is loaded, and values computed from them are constants already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from lenz.frontend.program import FxProgram
from lenz.frontend.symbols import about
from lenz.frontend.values import storage_of

PLAIN = (FakeTensor, torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
NAMED = (
    torch.dtype, torch.device, torch.layout, torch.memory_format, bool, int, str, type(None),
    type(...),
)  # fmt: skip


class Untold(Exception):
    """A value that has no text."""


def identity(program: FxProgram) -> str | None:
    """Return the text; None if a part of the program has none, such as a body."""
    if program.modules:
        return None
    try:
        return IdentityText().whole(program)
    except Untold:
        return None


class IdentityText:
    """Numbers storages and collects symbols in the order of appearance."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        self.symbols: dict[str, Any] = {}
        self.known: dict[Any, str] = {}

    def whole(self, p: FxProgram) -> str:
        lines = [f"{p.kind} {p.mutated} {tuple(p.saved)} {p.deterministic:d}"]
        for i in p.placeholders:
            own = f"{i.kind} {i.name} {i.is_static:d}{i.is_donated:d}"
            lines.append(f"{own} {i.source!r} {self.value(i.value)}")
        for n in p.gm.graph.nodes:
            given = f"{self.value(n.args)} {self.value(n.kwargs)}"
            kind = self.value(n.meta.get("val"))
            lines.append(f"{n.op} {n.name} {self.target(n)} {given} {kind}")
        lines += [f"constant {name} {self.value(t)}" for name, t in p.constants.items()]
        # The nodes and storage numbers of results show what they share.
        lines += [f"result {self.value(o.node)} {self.value(o.value)}" for o in p.outputs]
        lines.append(f"apart {p.apart}")
        lines += [str(b) for b in p.symbols.bindings]
        lines += [f"{name} {fact}" for name, fact in sorted(p.facts.items())]
        lines += about(p.symbols, [self.symbols[name] for name in sorted(self.symbols)])
        return "\n".join(lines)

    def target(self, n: Node) -> str:
        """The callee; with its schema if the op is not torch's, since that may change."""
        t = n.target
        if isinstance(t, str):
            return t
        if isinstance(t, torch._ops.OpOverload):
            return str(t) if t.namespace in ("aten", "prims") else f"{t} {t._schema}"
        name = getattr(t, "__name__", None)
        if name is None or isinstance(t, torch._ops.HigherOrderOperator):
            raise Untold
        return f"{getattr(t, '__module__', '')}.{name}"

    def value(self, v: Any) -> str:
        match v:
            case Node():
                return f"%{v.name}"
            case torch.Tensor():
                return self.tensor(v)
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return self.symbolic(v)
            case float():
                return v.hex()
            case complex():
                return f"{v.real.hex()}+{v.imag.hex()}j"
            case list() | tuple():  # a torch.Size is written as a tuple
                inner = ",".join(map(self.value, v))
                return f"[{inner}]" if isinstance(v, list) else f"({inner})"
            case slice():
                return f"slice{self.value((v.start, v.stop, v.step))}"
            case Mapping():
                return "{" + ",".join(f"{k!r}:{self.value(x)}" for k, x in v.items()) + "}"
            case _ if type(v) in NAMED:
                return repr(v)
            case FakeScriptObject():
                # A call only passes it on: compiled code depends on nothing else of it.
                return f"object {v.script_class_name}"
        raise Untold

    def tensor(self, t: torch.Tensor) -> str:
        key = storage_of(t)
        if type(t) not in PLAIN or t.layout is not torch.strided or t.is_quantized or key is None:
            raise Untold
        number = self.storages.setdefault(key, len(self.storages))
        bits = f"{t.is_conj():d}{t.is_neg():d}{t.requires_grad:d}"
        layout = ";".join(map(self.sizes, (t.shape, t.stride(), (t.storage_offset(),))))
        return f"{t.dtype} {t.device} {layout} {bits} @{number}"

    def sizes(self, sizes: Sequence[int | torch.SymInt]) -> str:
        return ",".join(str(s) if type(s) is int else self.symbolic(s) for s in sizes)

    def symbolic(self, s: Any) -> str:
        e = getattr(s.node, "expr", None)
        if e is None:
            constant = s.node.maybe_as_int()
            if constant is None:
                raise Untold
            return f"the {constant}"
        if e not in self.known:
            self.known[e] = f"<{type(e).__name__} {e}>"
            self.symbols.update((str(x), x) for x in sorted(e.free_symbols, key=str))
        return self.known[e]
