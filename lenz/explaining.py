"""`explain` and `profile`: compile a function, run it, and describe its graphs and times."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from lenz.api import compile_graph
from lenz.errors import UserError
from lenz.frontend.untraced import calling
from lenz.options import Options

if TYPE_CHECKING:  # as in `api`
    from lenz.debug.profile import Profile
    from lenz.page.report import Report


def _fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with its own code object.

    Dynamo caches compilations at the code object, and falls back to eager after eight of them.
    Reports would use up the limit of the user's own torch.compile.
    """
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)
    own: Any = fn if isinstance(fn, FunctionType) else calling(fn)
    made = FunctionType(
        own.__code__.replace(), own.__globals__, own.__name__, own.__defaults__, own.__closure__
    )
    made.__kwdefaults__ = own.__kwdefaults__
    made.__dict__.update(own.__dict__)
    return made


def _check(fn: object, calls: int, profile: int = 0) -> None:
    """Raise UserError if there is nothing to call, or a number of calls is wrong."""
    if not callable(fn):
        raise UserError(f"expected a function or a module, got {fn!r}")
    for name, n, least in (("calls", calls, 1), ("profile", profile, 0)):
        if not isinstance(n, int) or n < least:
            raise UserError(f"{name}: expected a whole number from {least}, got {n!r}")


def explain(
    fn: Callable[..., Any],
    dynamic: bool | None = None,
    options: Mapping[str, object] | None = None,
    calls: int = 1,
    profile: int = 0,
    others: Sequence[tuple[Any, ...]] = (),
) -> Callable[..., Report]:
    """Return a function that compiles `fn`, runs it on its arguments, and returns a report.

        report = lenz.explain(f)(x, y)
        len(report.launches), report.graphs[0].kernels[0].bytes_read
        report.save("report.html")

    `dynamic` and `options` are those of torch.compile. The report includes a backward pass if `fn`
    runs it. It describes the last of `calls` calls, and says what CUDA graphs did in all of them.
    Then `fn` is called with each tuple of arguments in `others`: the report has the graphs and
    recompiles that they cause. At last `profile` more calls are timed step by step, as
    `lenz.profile` does; with it, all calls run without CUDA graphs. Raises any error of `fn` and of
    the compiler.
    """
    _check(fn, calls, profile)
    chosen = Options.from_environment(options)

    def explained(*args: Any, **kwargs: Any) -> Report:
        from lenz.debug.profile import Profile
        from lenz.page.explainer import Explainer
        from lenz.page.guards import recompiles

        seen, since = Explainer(), time.time_ns() // 1000
        ran = Profile(has_gaps=not chosen.profile_device_time) if profile else None
        backend = seen.backend(chosen, [] if ran is None else [ran.watch])
        run = torch.compile(_fresh(fn), backend=backend, dynamic=dynamic)
        for _ in range(calls):
            seen.launches.clear()
            result = run(*args, **kwargs)
        launches = [*seen.launches]
        for more in others:
            run(*more)
        if ran is not None:
            ran.clear()
            for _ in range(profile):
                run(*args, **kwargs)
        seen.launches = launches
        return seen.report(result, ran=ran, recompiles=tuple(recompiles(since)))

    return explained


def profile(
    fn: Callable[..., Any],
    dynamic: bool | None = None,
    options: Mapping[str, object] | None = None,
    calls: int = 10,
) -> Callable[..., Profile]:
    """Return a function that compiles `fn`, runs it, and returns the times of its kernels.

        print(lenz.profile(f)(x, y))
        lenz.profile(f)(x, y).save("trace.json")

    `dynamic` and `options` are those of torch.compile. `fn` runs once to be compiled, then `calls`
    times, which are timed step by step: by Python and without CUDA graphs, so that whole calls take
    longer than otherwise.
    """
    _check(fn, calls)
    chosen = Options.from_environment(options)

    def profiled(*args: Any, **kwargs: Any) -> Profile:
        from lenz.debug.profile import Profile

        seen = Profile(has_gaps=not chosen.profile_device_time)
        backend = lambda gm, xs: compile_graph(gm, xs, chosen, watching=[seen.watch])
        run = torch.compile(_fresh(fn), backend=backend, dynamic=dynamic)
        run(*args, **kwargs)
        seen.clear()
        for _ in range(calls):
            run(*args, **kwargs)
        return seen

    return profiled
