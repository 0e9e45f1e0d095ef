"""Types of results of operands of several types: what torch tells of them, and what lenz gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import lenz
from lenz.frontend.restride import mistold
from tests.e2e.sides import agree, gradients_agree
from tests.e2e.sweep import cases

HALF, FLOAT, DOUBLE = torch.bfloat16, torch.float32, torch.float64
PAIRS = ((HALF, DOUBLE), (FLOAT, HALF), (torch.float16, FLOAT), (FLOAT, torch.int64))


class Watch(TorchDispatchMode):
    """Compares each call of aten with what is told of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()
        self.wrong: dict[str, None] = {}

    def __torch_dispatch__(
        self, fn: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = fn(*args, **kwargs)
        given = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        key = (str(fn), *((a.dtype, a.dim() == 0) for a in given))
        few = len({a.dtype for a in given}) < 2 or fn._schema.is_mutable or fn.namespace != "aten"
        if few or key in self.seen or any(a.layout is not torch.strided for a in given):
            return out
        self.seen.add(key)
        mode = FakeTensorMode()

        def fake(x: Any) -> Any:
            return mode.from_tensor(x) if isinstance(x, Tensor) else x

        try:
            fakes = pytree.tree_map(fake, (args, kwargs))
            with mode:
                told = fn(*fakes[0], **fakes[1])
        except Exception:  # noqa: BLE001 - tracing would stop there too
            return out
        corrected = mistold(fn, fakes[0], told)
        for k, (x, y) in enumerate(zip(*map(pytree.tree_leaves, (out, told)), strict=True)):
            if isinstance(x, Tensor) and x.dtype is not corrected.get(k, y.dtype):
                self.wrong[f"{key}: result {k} is {x.dtype}, and told as {y.dtype}"] = None
        return out


# Of which something was told wrong.
KNOWN = (
    "addr", "normal", "native_batch_norm", "nn.functional.group_norm", "nn.functional.layer_norm",
    "nn.functional.huber_loss", "nn.functional.soft_margin_loss",
)  # fmt: skip


def mixed(
    ops: Sequence[Any], first: torch.dtype, others: torch.dtype
) -> Iterator[Callable[[], Any]]:
    """Calls of ops with a first argument of one type, and the others of another."""

    def to(x: Any, dtype: torch.dtype) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.dtype is FLOAT else x

    for op in ops:
        for s in islice(op.sample_inputs("cpu", FLOAT, requires_grad=False), 3):
            x = to(s.input, first)
            args, kwargs = pytree.tree_map(lambda x: to(x, others), (s.args, s.kwargs))
            yield lambda o=op, x=x, a=args, k=kwargs: o.op(x, *a, **k)  # type: ignore[misc]


def test_what_torch_tells_of_types_is_right_or_corrected(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("expecttest", reason="torch's op database needs it")
    ops = [op for op in cases() if FLOAT in op.supported_dtypes("cpu")]
    is_all = request.config.getoption("--all-ops", default=False)
    chosen = ops if is_all else [o for k, o in enumerate(ops) if k % 96 == 0 or o.name in KNOWN]
    watch = Watch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for pair in PAIRS:
            for call in mixed(chosen, *pair):
                try:
                    with watch:
                        call()
                except Exception:  # noqa: BLE001 - eager refuses these types
                    continue
    assert len(watch.seen) > 30
    assert not watch.wrong, "\n".join(watch.wrong)


LOSSES = (F.huber_loss, F.smooth_l1_loss, F.mse_loss, F.l1_loss, F.soft_margin_loss)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fn", LOSSES, ids=lambda f: f.__name__)
def test_losses_of_two_types(fn: Callable[..., Tensor]) -> None:
    for first, second in ((HALF, DOUBLE), (DOUBLE, HALF)):
        made = lambda p=first, q=second: (torch.randn(4).to(p), torch.randn(4).to(q))  # type: ignore[misc]
        for how in ("none", "mean"):
            try:
                fn(*made(), reduction=how)
            except RuntimeError:
                continue
            agree(lambda x, y, h=how: fn(x, y, reduction=h) * 2, made, tol=2e-2)  # type: ignore[misc]


@pytest.mark.filterwarnings("ignore:.*in eager.*")
def test_the_gradient_of_a_loss_of_two_types() -> None:
    """What is told of the loss would be the type of the gradient that it is given."""
    y = torch.randn(4, dtype=DOUBLE)
    gradients_agree(
        lambda x: F.soft_margin_loss(x, y),
        lambda: [torch.randn(4, dtype=HALF, requires_grad=True)],
        tol=2e-2,
    )


def test_norms_of_halves_with_weights_in_single_keep_single_statistics() -> None:
    w, b = torch.randn(64), torch.randn(64)

    def fn(x: Tensor) -> Tensor:
        return F.layer_norm(x, (64,), w, b) + F.group_norm(x.unsqueeze(-1), 2, w, b).squeeze(-1)

    gradients_agree(fn, lambda: [(torch.randn(8, 64) * 3 + 50).to(HALF).requires_grad_()], tol=3e-2)
    agree(
        lambda x: torch.ops.aten.native_layer_norm(x, [64], w, b, 1e-5),
        lambda: [(torch.randn(8, 64) * 3 + 50).to(HALF)],
        tol=2e-2,
    )


def test_addr_of_two_types() -> None:
    given = lambda: [
        torch.randn(3, 4, dtype=DOUBLE),
        torch.randn(3).to(HALF),
        torch.randn(4).to(HALF),
    ]
    agree(lambda m, x, y: torch.addr(m, x, y) * 2, given, tol=1e-2)


def test_bits_seen_as_another_type_are_read_in_loops() -> None:
    def halved(x: Tensor) -> Tensor:
        """1 / sqrt(x), roughly, by the exponent of x."""
        y = (0x5F3759DF - (x.view(torch.int32) >> 1)).view(FLOAT)
        return y * (1.5 - 0.5 * x * y * y)

    def turned(x: Tensor) -> tuple[Tensor, Tensor]:
        return ((x + 1)[:, 1:].t().view(torch.int16) & 0x7FFF).view(HALF), x.view(torch.int16)

    def told(x: Tensor) -> Tensor:
        return x.view(torch.bool).logical_not() | x.view(torch.int8).view(torch.float8_e5m2).isnan()

    x = torch.rand(7, 9) + 0.1
    agree(halved, lambda: [x], tol=0.0)
    agree(halved, lambda: [x.t()], tol=0.0, dynamic=True)
    (graph,) = lenz.explain(halved)(x).graphs
    assert len(graph.kernels) == 1 and not graph.externs
    bits, same = agree(turned, lambda: [x.to(HALF)], tol=0.0)
    assert bits.dtype is HALF and same.dtype is torch.int16
    agree(told, lambda: [torch.arange(256).to(torch.uint8)], tol=0.0)
    viewed = torch.compile(lambda x: x.view(torch.int32), backend="lenz")(x)
    assert viewed.data_ptr() == x.data_ptr()
