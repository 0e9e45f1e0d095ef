"""What the text of a plan holds stands in its Python as a name or a literal, and is never run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lenz.ir.dtype import F32
from lenz.ir.graph import Named, Ref
from lenz.ir.plan import Alloc, BindSize, CallStep, Input, LaunchStep, Plan, SizeInput
from lenz.ir.printer import show
from lenz.ir.reader import read
from lenz.ir.tensor import TensorType, contiguous
from lenz.plan.python import source
from lenz.runtime import executor
from lenz.sym import Int, Var

CODE = "k = print('run')\nk"
ROWS = TensorType(F32, "cpu", contiguous((Int(8),)))
CALL = CallStep("aten.relu.default", (Ref("x"),), (), ("y",), True)
PLAIN = Plan("p", (Input("x", ROWS),), (), (CALL,), (Ref("y"),), ())
FORGED = {
    "a kernel": replace(PLAIN, kernels=(CODE,)),
    "a launch": replace(PLAIN, steps=(LaunchStep(CODE, ("x",), ()),), outputs=(Ref("x"),)),
    "a constant": replace(PLAIN, constants=(Input(CODE, ROWS),)),
    "an argument that is a size": replace(
        PLAIN, inputs=(*PLAIN.inputs, SizeInput(Var("torch.x", 1)))
    ),
    "a size that is read": replace(PLAIN, steps=(BindSize(Var("torch.x", 1), "x", 0), CALL)),
    "a size that is bounded": replace(PLAIN, most=((CODE, 8),)),
    "a size that a call gives": replace(
        PLAIN, steps=(replace(CALL, outs=("y", Var("torch.x", 0))),)
    ),
    "an argument by name": replace(PLAIN, steps=(replace(CALL, kwargs=((CODE, 1),)),)),
    "an object of torch": replace(PLAIN, outputs=(Named("memory_format", CODE),)),
}


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("what", FORGED)
def test_what_is_no_name_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match="cannot be a name"):
        source(FORGED[what])


@pytest.mark.parametrize("name", [CODE, "'''; run()", '"""; run()', "\\", "{globals}"])
def test_other_names_are_literals(name: str) -> None:
    steps = (Alloc(name, ROWS), replace(CALL, args=(Ref(name),)))
    given = Input("x", ROWS, called=name)
    p = Plan(name, (given,), (), steps, (Ref("y"),), (), objects=(name,))
    again = read(show(p))
    assert isinstance(again, Plan) and again == p
    module: dict[str, object] = {"__name__": "plan"}
    exec(compile(source(again), "<plan>", "exec"), module)
    assert callable(module["call"]) and "k" not in module


@pytest.mark.parametrize("op", ["py.os.system", "py.torch.os.system", "py.builtins.eval"])
def test_an_op_is_one_of_torch_or_of_numbers(op: str) -> None:
    with pytest.raises((KeyError, AttributeError)):
        executor.resolve(op)
