"""Library calls by libtorch's C shims: aoti_torch_<device>_<op>, without Python and the GIL.

A shim takes the tensors of `out=` first, then the arguments of the op's schema as C types, then
pointers for the results. It returns 0, or another status if the op raised. Only ops that write
nothing but `out=` and return no aliases are called this way; for others `shim` returns False.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from lenz.ir.dtype import BY_NAME
from lenz.ir.graph import Named, Ref, names_in
from lenz.ir.plan import CallStep
from lenz.plan.native_frame import Frame, kind_and_number
from lenz.plan.native_text import CODES
from lenz.sym import Int, Sym, Var

RESULTS: Mapping[str, type] = {"Tensor": str, "int": Sym, "SymInt": Sym}
NEWEST = 9  # the highest shim version to look for


class _Unfit(Exception):
    """This call has no shim."""


def shim(f: Frame, s: CallStep) -> bool:
    """Call an op by its shim, if it has one for these arguments."""
    schema = f.layout.schema(s.op)
    tensors = names_in(s)
    kind = _kind(f, tensors)
    if schema is None or not s.op.startswith("aten.") or not kind or s.counted:
        return False
    symbol = _symbol(f, s.op, kind)
    try:
        if not symbol or not _returns(s, schema):
            return False
        floats = all(n in f.types and f.types[n].dtype.is_float for n in tensors)
        args = _arguments(f, s, schema, floats)
    except _Unfit:
        return False
    rest = [] if s.into else [_result(f, o, r) for o, r in zip(s.outs, schema.returns, strict=True)]
    f.release()
    args += [f"ptr {at}" for at in rest]
    f.shims.append(symbol)
    f.out.declare(symbol, f"declare i32 @{symbol}({', '.join(x.split()[0] for x in args)})")
    f.out.put(f"call void @below(ptr %guard, i64 {f.layout.autograd})")
    status = f.out.let(f"call i32 @{symbol}({', '.join(args)})")
    f.out.put("call void @above(ptr %guard)")
    f.succeed(status)
    for o, at in zip(s.outs, rest, strict=False):
        if isinstance(o, Var):
            f.bind(o, f.out.let(f"load i64, ptr {at}"))
    return True


def _kind(f: Frame, tensors: Sequence[str]) -> str:
    """The device type that the call runs on; "" if unknown."""
    kinds = {kind_and_number(f.types[n].device)[0] if n in f.types else "" for n in tensors}
    if "cuda" in kinds:
        return "cuda"
    return "cpu" if kinds == {"cpu"} else ""


def _symbol(f: Frame, op: str, kind: str) -> str:
    """The newest shim of an op; "" if there is none."""
    _, name, overload = op.split(".")
    plain = f"aoti_torch_{kind}_{name}" + f"_{overload}" * (overload != "default")
    versions = [f"{plain}_v{n}" for n in range(NEWEST, 1, -1)]
    # If a shim has several versions, the first has an older schema than this op.
    return next((x for x in (*versions, plain) if f.layout.has(x)), "")


def _returns(s: CallStep, schema: Any) -> bool:
    """Whether the results are new tensors and integers, one for each name."""
    if s.into:
        return True
    if len(schema.returns) != len(s.outs):
        return False
    for o, r in zip(s.outs, schema.returns, strict=True):
        kind = RESULTS.get(str(r.real_type))
        if kind is None or r.alias_info is not None or not isinstance(o, kind | None):
            return False
    return True


def _result(f: Frame, o: object, returned: Any) -> str:
    """The pointer for a result."""
    if str(returned.real_type) != "Tensor":
        return f.out.cell()
    return f.slot(f.new(o if isinstance(o, str) else f"%{len(f.slots)}"))


def _arguments(f: Frame, s: CallStep, schema: Any, floats: bool) -> list[str]:
    """The arguments as C types; raises _Unfit."""
    given, named = list(s.args), dict(s.kwargs)
    if len(given) > len(schema.arguments):
        raise _Unfit
    outs: list[str] = []
    args: list[str] = []
    for k, a in enumerate(schema.arguments):
        if k < len(given):
            value: Any = given[k]
        elif a.name in named:
            value = named[a.name]
        elif a.has_default_value():
            usual = a.default_value
            value = tuple(usual) if isinstance(usual, list) else usual
        else:
            raise _Unfit
        if a.alias_info is None:
            args += _argument(f, str(a.real_type), value, floats)
        elif s.into and a.is_out and isinstance(value, Ref):
            outs.append(f"ptr {f.handle(value.name)}")
        else:
            raise _Unfit  # it writes, or returns an alias
    return outs + args


def _argument(f: Frame, kind: str, value: Any, floats: bool) -> list[str]:
    """One argument; an optional one is a pointer to its value, or null."""
    inner = kind.removeprefix("Optional[").removesuffix("]") if kind[:9] == "Optional[" else ""
    if inner:
        if value is None:
            extra = ["i64 0"] * inner.startswith("List[") + ["i32 0"] * (inner == "Device")
            return ["ptr null", *extra]
        first, *rest = _argument(f, inner, value, floats)
        type, _, text = first.partition(" ")
        return [f"ptr {f.out.array([text], type)}", *rest]
    if kind.startswith("List["):
        if not isinstance(value, tuple):
            raise _Unfit
        parts = [_single(f, kind[5:-1], v, floats).split(" ", 1) for v in value]
        type = parts[0][0] if parts else "ptr"
        return [f"ptr {f.out.array([text for _, text in parts], type)}", f"i64 {len(parts)}"]
    return [_single(f, kind, value, floats)]


def _single(f: Frame, kind: str, value: Any, floats: bool) -> str:
    """One value as `type text`; raises _Unfit."""
    value = value.value if isinstance(value, Int) else value
    match kind, value:
        case "Tensor", Ref():
            return f"ptr {f.handle(value.name)}"
        case "Tensor", None:
            slot = f.slot(f.new(f"%{len(f.slots)}"))
            f.out.put(f"call void @undefined(ptr {slot})")
            return f"ptr {f.out.let(f'load ptr, ptr {slot}')}"
        case "bool", bool():
            return f"i32 {int(value)}"
        case (("int" | "SymInt"), Sym()):
            return f"i64 {f.number(value)}"
        case (("int" | "SymInt"), int()) if not isinstance(value, bool):
            return f"i64 {value}"
        case (("float" | "number"), float()):
            return f"double {_double(value)}"
        # The shim turns a number into a float, which promotes integers.
        case (("float" | "number"), int()) if type(value) is int and (floats or kind == "float"):
            return f"double {_double(float(value))}"
        case "ScalarType", Named("dtype", name):
            return f"i32 {CODES[BY_NAME[name].name]}"
    raise _Unfit


def _double(value: float) -> str:
    """A double as LLVM reads it: its bits in hexadecimal."""
    return f"0x{struct.pack('>d', value).hex().upper()}"
