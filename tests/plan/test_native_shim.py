"""Calls of libtorch's C shims: their arguments are those of torch's headers."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lenz.ir.dtype import DTYPES, F32, I64, DType
from lenz.ir.graph import Atom, Named, Ref
from lenz.ir.plan import CallStep
from lenz.ir.tensor import Layout as Strides
from lenz.ir.tensor import TensorType
from lenz.plan.native_frame import Frame, TorchLayout
from lenz.plan.native_shim import shim
from lenz.plan.native_text import CODES
from lenz.sym import sym

HEADERS = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_torch/generated"
C = {"int64_t": "i64", "int32_t": "i32", "double": "double", "AtenTensorHandle": "ptr"}


def declared(kind: str) -> dict[str, list[str]]:
    """The functions of a header, with their arguments as LLVM has them."""
    text = (HEADERS / f"c_shim_{kind}.h").read_text()
    found = {}
    for name, inside in re.findall(r"AOTITorchError (\w+)\((.*?)\);", text, re.DOTALL):
        args = [a.rsplit(" ", 1)[0].removeprefix("const ") for a in inside.split(", ")]
        found[name] = ["ptr" if "*" in a else C.get(a, a) for a in args]
    return found


CPU, CUDA = declared("cpu"), declared("cuda")


def frame(kind: str, known: dict[str, list[str]], dtype: DType = F32) -> Frame:
    def schema(op: str) -> Any:
        _, name, overload = op.split(".")
        return getattr(getattr(torch.ops.aten, name), overload)._schema

    f = Frame(TorchLayout(16, 8, 0, {}, 0, 0, 0, schema, known.__contains__))
    place = "cpu" if kind == "cpu" else "cuda:0"
    layout = Strides((sym(4),), (sym(1),))
    f.types["x"] = TensorType(dtype, place, layout)
    f.new("x")
    return f


GIVEN: dict[str, Atom] = {
    "Tensor": Ref("x"), "bool": True, "int": sym(2), "SymInt": sym(2), "float": 0.5,
    "number": 2, "ScalarType": Named("dtype", "f32"),
}  # fmt: skip


def given(kind: str, empty: bool) -> Atom:
    """A value for an argument; raises KeyError if no shim is called with this kind."""
    if kind.startswith("Optional["):
        return None if empty else given(kind[9:-1], empty)
    if kind.startswith("List["):
        return (given(kind[5:-1], empty),) * 2
    return GIVEN[kind]


def ops(known: dict[str, list[str]], kind: str) -> list[tuple[str, str]]:
    """The functions of a header with the ops of torch that they call."""
    found = []
    for symbol in known:
        name = re.sub(r"_v\d+$", "", symbol.removeprefix(f"aoti_torch_{kind}_"))
        parts = name.split("_")
        for k in range(len(parts), 0, -1):
            op, overload = "_".join(parts[:k]), "_".join(parts[k:]) or "default"
            packet = getattr(torch.ops.aten, op, None)
            if packet is not None and overload in packet.overloads():
                found.append((symbol, f"aten.{op}.{overload}"))
                break
    return found


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_arguments_are_those_of_the_headers(kind: str, empty: bool) -> None:
    known = CPU if kind == "cpu" else CUDA
    called = set()
    for _, op in ops(known, kind):
        f = frame(kind, known)
        schema = f.layout.schema(op)
        try:
            values = [(a, given(str(a.real_type), empty)) for a in schema.arguments]
        except KeyError:
            continue
        into = any(a.is_out for a, _ in values)
        outs = () if into else tuple(f"r{k}" for k in range(len(schema.returns)))
        args = tuple(v for a, v in values if not a.kwarg_only)
        kwargs = tuple((a.name, v) for a, v in values if a.kwarg_only)
        if shim(f, CallStep(op, args, kwargs, outs, len(outs) == 1, into)):
            (symbol,) = f.shims
            (line,) = [x for x in f.out.globals if x.startswith("declare")]
            kinds = line.split("(")[1].rstrip(")").split(", ")
            assert kinds == known[symbol], op
            called.add(op)
    usual = {"mm.out", "addmm.out", "bmm.out", "convolution.default", "topk.default"}
    usual |= {"convolution_backward.default"} if kind == "cuda" else set()
    assert {f"aten.{x}" for x in usual} <= called and len(called) > 40


def call(op: str, *args: Atom, **kwargs: Atom) -> CallStep:
    return CallStep(op, args, tuple(kwargs.items()), ("r",), True, False)


def test_what_has_no_shim_is_left_to_python() -> None:
    cases = [
        call("aten.erfinv.default", Ref("x")),  # no header has it
        call("aten.add_.Tensor", Ref("x"), Ref("x")),  # writes
        call("aten.view.default", Ref("x"), (sym(2), sym(2))),  # gives an alias
        call("aten.topk.default", Ref("y"), sym(2)),  # a tensor that may be anywhere
        call("aten.cumsum.default", Ref("x"), True),  # a bool for an int
        call("aten.randint.default", sym(3), (sym(2),)),  # no tensor says where
    ]
    for s in cases:
        assert not shim(frame("cpu", CPU), s), s.op


def test_a_whole_number_stays_exact_for_integers() -> None:
    """A shim makes a number a float, in which an operand that is an integer is lost."""
    known = {"aoti_torch_cpu_add_Scalar": ["ptr", "double", "double", "ptr"]}
    s = call("aten.add.Scalar", Ref("x"), 2)
    assert shim(frame("cpu", known), s)
    assert not shim(frame("cpu", known, I64), s)


def test_the_newest_version_is_called() -> None:
    known = {"aoti_torch_cpu_abs": ["ptr", "ptr"], "aoti_torch_cpu_abs_v3": ["ptr", "ptr"]}
    f = frame("cpu", known)
    assert shim(f, call("aten.abs.default", Ref("x")))
    assert f.shims == ["aoti_torch_cpu_abs_v3"]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_codes_of_dtypes_are_torchs(dtype: DType) -> None:
    folder = Path(torch.__file__).parent / "lib"
    name = "torch_cpu.dll" if sys.platform == "win32" else "libtorch_cpu"
    [file] = [p for p in folder.glob(f"{name}*") if p.suffix in (".so", ".dylib", ".dll")]
    said = getattr(ctypes.CDLL(str(file)), f"aoti_torch_dtype_{str(dtype.torch).split('.')[1]}")
    assert CODES[dtype.name] == said()
