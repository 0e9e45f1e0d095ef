"""The `self` of a plan's native code, and the errors that it raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NoReturn, TypeAlias

import torch

from lenz.errors import InternalError, annotate
from lenz.ir.dtype import BY_NAME
from lenz.ir.graph import Atom, Named, Ref
from lenz.ir.plan import Alloc, Boxed, CallStep, Check, LaunchStep, Plan, place_of
from lenz.plan.native import Native
from lenz.runtime import executor
from lenz.runtime.captured import Runner
from lenz.runtime.native import said
from lenz.sym import Int, Sym

Look: TypeAlias = Callable[[Ref | Sym], Any]


def objects(
    made: Native, p: Plan, values: Mapping[str, Any], own: Mapping[str, Any], slow: Boxed
) -> tuple[Any, ...]:
    """The objects of a plan's native code.

    `values` are kernels and constants, `own` the plan's objects, `slow` is its Python function.
    """
    fail = failure(made, p, values, own)
    return tuple([_object(x, values, own, slow, fail) for x in made.objects])


def _object(
    what: Any, values: Mapping[str, Any], own: Mapping[str, Any], slow: Any, fail: Any
) -> Any:
    match what:
        case "slow":
            return slow
        case "fail":
            return fail
        case "detach":
            return torch.Tensor.detach
        case str():
            return getattr(executor, what)
        case ("constant", name):
            return values[name]
        case ("op", name):
            return executor.resolve(name)
        case ("names", names):
            return names
        case ("value", atom, sequence, _):
            return value(atom, own, _unknown, tuple if sequence == "tuple" else list)
    raise TypeError(f"{what!r} is not an object of a plan")


def _unknown(a: Ref | Sym) -> NoReturn:
    raise InternalError(f"{a} is not known before a call", pass_name="plan")


def value(a: Atom, own: Mapping[str, Any], look: Look, sequence: Any = list) -> Any:
    """The Python value of an atom; `look` finds tensors and sizes, `own` the plan's objects."""
    match a:
        case tuple():
            return sequence([value(x, own, look, sequence) for x in a])
        case Int():
            return a.value
        case Ref() | Sym():
            return look(a)
        case Named("obj", name):
            return own[name]
        case Named():
            return torch_object(a)
        case _:
            return a


def torch_object(named: Named) -> Any:
    """The object of torch that an argument names: a type, a device, an op or a format."""
    match named:
        case Named("device", name):
            return torch.device(name)
        case Named("op", name):
            return executor.resolve(name)
        case Named("dtype", name):
            return BY_NAME[name].torch
    return reduce(getattr, named.value.split("."), torch)


def failure(
    made: Native, p: Plan, values: Mapping[str, Any], own: Mapping[str, Any]
) -> Callable[..., NoReturn]:
    """The function fail(step, status, tensors, numbers), which raises for a failed step.

    `tensors` are in the slots of the native code, `numbers` are sizes. The step is repeated in
    Python, which raises eager's error.
    """
    whys = dict(p.comments)

    def fail(step: int, status: int, tensors: Sequence[Any], numbers: Sequence[int]) -> NoReturn:
        what, s = f"{said()} (status {status})", p.flat[step]
        env = {name: tensors[k] for name, k in made.slots.items()}
        sizes = {v: numbers[k] for v, k in made.sizes.items()}
        run = Runner(values, env, sizes, lambda a, look: value(a, own, look), 0)
        run.failed = status
        try:
            match s:
                case Alloc() | CallStep() | Check():
                    run.step(s)
                case LaunchStep() if s.grid is not None:
                    if not s.graph:
                        run.stream = executor.stream(torch.device(s.device).index)
                        run.step(s)
                    what = f"{s.kernel} was not launched: CUDA error {status}"
            raise RuntimeError(what)
        except Exception as e:
            at = step
            while isinstance(p.flat[at], Check):  # it is about the launch before it
                at -= 1
            annotate(e, place_of(p.name, at, p.flat[at], whys.get(at)))
            raise

    return fail
