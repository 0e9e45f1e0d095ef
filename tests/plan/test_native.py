"""Plans that run by native code: the same results, errors and references as by Python."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, randn
from torch.utils._python_dispatch import TorchDispatchMode

from lenz import loading
from lenz.ir.dtype import DTYPES
from lenz.plan import native_link
from lenz.plan.native import native
from lenz.plan.native_frame import NotNative
from lenz.plan.python import source
from lenz.runtime.native import places

pytestmark = pytest.mark.skipif(places() is None, reason="this torch keeps its tensors otherwise")


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Plans by native code, whatever the switch of all tests says; how each of them was made."""
    found: list[str] = []

    def noted(*args: Any) -> Any:
        try:
            code = native(*args)
        except NotNative as e:
            found.append(str(e))
            raise
        found.append("native")
        return code

    monkeypatch.setenv("LENZ_NATIVE", "1")
    monkeypatch.setattr(loading, "native", noted)
    return found


def compiled(fn: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="lenz", options={"cache": False}, **how)


def numbers(x: Tensor, n: int) -> tuple[Any, ...]:
    return x * n, x.shape[0] * 2, n, None


def layers(x: Tensor, w: Tensor) -> Tensor:
    h = torch.softmax(x @ w, -1)
    return torch.cat([h, h.t() @ h]).cumsum(0)


def views(x: Tensor) -> tuple[Tensor, ...]:
    y = x.exp()
    return y, y[1:], y.t(), x.t(), x


def written(x: Tensor) -> Tensor:
    x.add_(1)
    return x[0] * 2


def mixed(x: Tensor) -> Tensor:
    top = (x.double() * 2).topk(2, dim=-1)
    return top.values.float() + top.indices + torch.tensor([1.5, -0.0])


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "layers": (layers, (randn(6, 5), randn(5, 6))),
    "mixed": (mixed, (randn(6, 5),)),
    "numbers": (numbers, (randn(6, 5), 3)),
    "views": (views, (randn(6, 5),)),
    "written": (written, (randn(6, 5),)),
    "large": (lambda x: x.cos() + 1, (randn(1100, 1000),)),
    "nothing": (lambda x: x[:0] + 1, (randn(6, 5),)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_results_are_eagers(name: str, dynamic: bool, made: list[str]) -> None:
    fn, args = CASES[name]
    run = compiled(fn, dynamic=dynamic)
    for _ in range(3):
        mine, theirs = [[a.clone() if isinstance(a, Tensor) else a for a in args] for _ in "ab"]
        got, want = run(*mine), fn(*theirs)
        torch.testing.assert_close(got, want, equal_nan=True)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b)
        for a, b in zip(_tensors(got), _tensors(want), strict=True):
            assert a.stride() == b.stride() and (a._base is None) == (b._base is None)
    assert "native" in made


def _tensors(x: Any) -> list[Tensor]:
    return [t for t in (x if isinstance(x, tuple) else (x,)) if isinstance(t, Tensor)]


def test_gradients(made: list[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3))
    x = randn(4, 5)
    weight = next(model.parameters())
    (want,) = torch.autograd.grad(model(x).square().sum(), weight)
    (got,) = torch.autograd.grad(compiled(model)(x).square().sum(), weight)
    torch.testing.assert_close(got, want)
    assert made == ["native", "native"]


def test_what_does_not_fit_is_left_to_python(made: list[str]) -> None:
    """Gradients with other strides or a bit for the sign, and tensors of another class."""
    x = randn(4, 6, requires_grad=True)
    run = compiled(lambda x: x * x)
    for g in (randn(6, 4).t(), torch._neg_view(randn(4, 6)), torch.ones(()).expand(4, 6)):
        (got,) = torch.autograd.grad(run(x), x, g)
        torch.testing.assert_close(got, 2 * x * g)

    class Other(Tensor):
        pass

    torch.testing.assert_close(run(randn(4, 6).as_subclass(Other)).shape, torch.Size((4, 6)))


def test_errors_are_eagers_and_leave_nothing_behind() -> None:
    table, big = randn(1 << 16, 4), compiled(lambda x, n: x.expand(n, 3) + 1, dynamic=True)
    run = compiled(lambda t, i: (t + 1)[i] * 2)
    for _ in range(3):
        run(table, torch.tensor([1, 2]))
    with pytest.raises(IndexError) as mine:
        run(table, torch.tensor([1, 1 << 20]))
    with pytest.raises(IndexError) as theirs:
        table[torch.tensor([1, 1 << 20])]
    assert type(mine.value) is type(theirs.value)
    big(randn(1, 3), 5)
    with pytest.raises(RuntimeError, match="alloc"):
        big(randn(1, 3), 1 << 50)
    wrong = torch.tensor([1, 1 << 20])
    before = _resident()
    for _ in range(1_000):
        with pytest.raises(IndexError):
            run(table, wrong)
    gc.collect()
    assert _resident() - before < 64 << 20, "each call had 1 MiB"


def _resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_references() -> None:
    x, y = randn(4), randn(4)
    run = compiled(lambda x, y: (x + y, x))
    run(x, y)
    before = sys.getrefcount(x), sys.getrefcount(y)
    for _ in range(5):
        kept = run(x, y)
        assert kept[1] is x
        del kept
    assert (sys.getrefcount(x), sys.getrefcount(y)) == before


@pytest.mark.slow
def test_threads() -> None:
    """100,000 calls of one graph by 8 threads: each gets its own results, to the bit."""
    run = compiled(lambda x: torch.softmax(x @ x, -1).sum(0) + 1)
    wrong: list[int] = []

    def work(seed: int) -> None:
        x = randn(8, 8, generator=torch.Generator().manual_seed(seed))
        want = run(x)
        torch.testing.assert_close(want, torch.softmax(x @ x, -1).sum(0) + 1)
        wrong.extend(1 for _ in range(12_500) if not torch.equal(run(x), want))

    run(randn(8, 8))
    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_plain_tensor_is_told_from_others() -> None:
    found = places()
    assert found is not None
    _, _, mask, plain, negative, _, bare = found
    x = randn(2, 2)

    def keys(t: Tensor) -> int:
        return int(torch._C._dispatch_keys(t).raw_repr()) & mask

    assert keys(x) == keys(x.t()) == keys(torch.nn.Parameter(x)) == plain
    for other in (torch._neg_view(x), x.to("meta"), x.to_sparse(), x.to(torch.complex64).conj()):
        assert keys(other) != plain
    assert keys(torch._neg_view(x)) & negative
    assert keys(x.to(torch.complex64).conj()) & bare == plain & bare, "it is dense too"
    zeros = torch._efficientzerotensor((2, 2))
    for other in (x.to("meta"), x.to_sparse(), x.to_mkldnn(), zeros):
        assert keys(other) & bare != plain & bare


def test_the_layout_is_found_under_any_default() -> None:
    with torch.device("meta"), torch.inference_mode():
        assert places.__wrapped__() == places()


def test_a_gradient_without_memory() -> None:
    """Only an eager op reads it, so that nothing else about it is checked."""
    w = randn(3, 4, requires_grad=True)
    y = compiled(lambda x, w: x @ w)(randn(2, 3), w)
    (got,) = torch.autograd.grad(y, w, torch._efficientzerotensor(y.shape))
    torch.testing.assert_close(got, torch.zeros(3, 4))


def called_from_python(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """For each plan that is made from here on: the ops that it calls by their Python functions."""
    found: list[tuple[str, ...]] = []

    def noted(*args: Any) -> Any:
        code = native(*args)
        found.append(tuple(o[1] for o in code.objects if isinstance(o, tuple) and o[0] == "op"))
        return code

    monkeypatch.setattr(loading, "native", noted)
    return found


def test_calls_of_libraries_need_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has a C entry is called by it; the results are those of the Python function."""
    calls = called_from_python(monkeypatch)

    def layers(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = torch.nn.functional.conv2d(x.relu(), w, b, padding=1).sin()
        q = y.flatten(2).unsqueeze(1)
        q = torch.nn.functional.scaled_dot_product_attention(q, q, q).squeeze(1)
        return torch.addmm(q[0, :, :4], q[0] + 1, q[1].t()[:, :4] * 2, alpha=0.5).cos()

    args = randn(2, 3, 4, 4), randn(4, 3, 3, 3), randn(4)
    torch.testing.assert_close(compiled(layers)(*args), layers(*args))
    torch.testing.assert_close(compiled(lambda x: torch.linalg.qr(x)[0])(args[0]),
                               torch.linalg.qr(args[0])[0])  # fmt: skip
    assert calls == [(), ("aten.linalg_qr.default",)]


@pytest.mark.slow
def test_an_error_of_a_library_is_eagers_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = called_from_python(monkeypatch)

    def unpacked(x: Tensor, pivots: Tensor) -> Tensor:
        return torch.lu_unpack(x * 2, pivots)[0] + 1

    run, x = compiled(unpacked), randn(256, 256)
    run(x, torch.arange(1, 257, dtype=torch.int32))
    assert calls == [()]
    wrong = torch.full((256,), 1000, dtype=torch.int32)
    with pytest.raises(RuntimeError) as theirs:
        unpacked(x, wrong)
    before = _resident()
    for _ in range(1_000):
        with pytest.raises(RuntimeError) as mine:
            run(x, wrong)
        assert str(mine.value) == str(theirs.value)
    (note,) = getattr(mine.value, "__notes__", ())
    assert "aten.lu_unpack.default" in note and "test_native.py" in note
    del mine
    gc.collect()
    assert _resident() - before < 16 << 20, "each call had 256 KiB"


def test_library_calls_stay_below_autograd() -> None:
    """Arguments that need gradients reach a forward that nobody differentiates twice."""
    w = torch.nn.Parameter(randn(4, 4))
    out = compiled(lambda x: (x @ w).sin())(randn(4, 4))
    out.sum().backward()
    assert w.grad is not None and out.grad_fn is not None
    with torch.no_grad():
        assert compiled(lambda x: torch.mm(x, w))(randn(4, 4)).grad_fn is None


def test_a_float_among_the_results_of_an_op() -> None:
    """Numbers that ops give are sizes, or anything else that other ops take."""

    def scaled(x: Tensor) -> Tensor:
        return torch.ones(4).mul_(x.shape[0] ** 0.5) + torch.full((2,), x.shape[0] / 3).sum()

    run = compiled(scaled, dynamic=True)
    for n in (3, 5):
        torch.testing.assert_close(run(randn(n)), scaled(randn(n)))


def test_memory_under_another_dtype() -> None:
    """A buffer takes the memory of one of another dtype, and an op sees its own dtype."""

    def cast(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x.round() @ x.round()).to(torch.int32)
        return y.topk(2)[0], (y.float() @ x.round()).round().to(torch.int32).cumsum(0)

    x = randn(64, 64)
    for got, want in zip(compiled(cast)(x), cast(x), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [d.torch for d in DTYPES], ids=str)
def test_every_dtype_is_kept_for_the_backward(dtype: torch.dtype, made: list[str]) -> None:
    def f(x: Tensor) -> Tensor:
        y = torch.ops.aten._to_copy(x, dtype=dtype)
        z = y.to(torch.complex64 if dtype.is_complex else torch.float32)
        return torch.addcmul(z, z, z, value=2).abs()

    x, y = (torch.tensor(3.0, requires_grad=True) for _ in range(2))
    got, want = torch.compile(f, backend="lenz")(x), f(y)
    if want.requires_grad:
        got.backward()
        want.backward()
    assert torch.equal(got, want)
    if x.grad is None or y.grad is None:
        assert x.grad is y.grad
    else:
        assert torch.equal(x.grad, y.grad)
    assert set(made) == {"native"}


@pytest.mark.parametrize("is_native", ("1", "0"))
def test_an_index_out_of_range_says_where(is_native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Tensor, i: Tensor) -> Tensor:
        return (x * 2)[i] + 1

    monkeypatch.setenv("LENZ_NATIVE", is_native)
    run = torch.compile(f, backend="lenz", options={"cache": False})
    run(randn(3), torch.tensor([1]))
    with pytest.raises(IndexError, match="index out of range") as raised:
        run(randn(3), torch.tensor([5]))
    (note,) = getattr(raised.value, "__notes__", ())
    assert re.fullmatch(r"graph0.inference, step \d: kernel \w+, \S+test_native.py:\d+, .*", note)


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The plans that are printed as Python, because a call needs that; torch checks first calls."""
    found: list[str] = []

    def noted(p: Any, *rest: Any, **more: Any) -> str:
        found.append(p.name)
        return source(p, *rest, **more)

    monkeypatch.setattr(loading, "source", noted)
    # The latter is an error where the variable CI is set.
    with torch._functorch.config.patch(
        check_custom_op_aliasing=True, error_on_custom_op_aliasing=False
    ):
        yield found


def test_the_first_call_needs_no_python(printed: list[str]) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return layers(x, w).square().sum()

    ours, eager = ([randn(4, 4, requires_grad=True) for _ in range(2)] for _ in range(2))
    with torch.no_grad():
        for a, b in zip(ours, eager, strict=True):
            b.copy_(a)
        assert torch.allclose(compiled(layers)(*ours), layers(*eager), atol=1e-5)
    compiled(f)(*ours).backward()
    f(*eager).backward()
    for a, b in zip(ours, eager, strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.allclose(a.grad, b.grad, atol=1e-4)
    assert not printed


def test_a_mode_of_the_user_sees_every_call(printed: list[str]) -> None:
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

    f, x, w = compiled(layers), randn(4, 4), randn(4, 4)
    want = f(x, w)
    assert not printed
    with Mode():
        assert torch.equal(f(x, w), want)
    assert printed and "aten.mm.out" in seen


def test_torch_still_checks_the_users_ops(printed: list[str]) -> None:
    with torch.library._scoped_library("lenz_native", "FRAGMENT") as library:
        library.define("same(Tensor x) -> Tensor")
        library.impl("same", lambda x: x[:], "CompositeExplicitAutograd")
        with pytest.warns(UserWarning, match="lenz_native::same.* must not"):
            compiled(lambda x: torch.ops.lenz_native.same(x.exp()) + 1)(randn(4))
    assert printed


def test_a_size_that_is_an_argument_twice_has_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places for sizes are on the stack, one for each; `expand` gets s64 three times."""
    texts: list[str] = []

    def noted(*args: Any) -> Any:
        code = native(*args)
        texts.append(code.text)
        return code

    monkeypatch.setattr(loading, "native", noted)
    x = randn(5, 1, 5)
    run = torch.compile(lambda x, *n: x.expand(n), backend="lenz", dynamic=True)
    assert torch.equal(run(x, 5, 5, 5), x.expand(5, 5, 5))
    (text,) = texts
    (places,) = re.findall(r"%n = alloca \[(\d+) x i64\]", text)
    used = re.findall(r"getelementptr i64, ptr %n, i64 (\d+)", text)
    assert used and max(map(int, used)) < int(places)


def test_a_fork_waits_for_the_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork would wait for good for a thread that it lacks."""

    def slow(gpu: bool, store: object) -> str:
        time.sleep(0.2)
        return "library"

    monkeypatch.setattr(native_link, "_linked", slow)
    library = native_link.begun.__wrapped__(False, None)
    child = os.fork()
    if child == 0:
        os._exit(0 if library.done() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_memory_that_a_call_replaces() -> None:
    """Kernels before and after the call have the same argument at different addresses."""

    def fn(x: Tensor) -> Tensor:
        y, memory = x * 2, x.untyped_storage()
        memory.resize_(0)
        z = (y @ y).sin()
        memory.resize_(300 * 300 * 4)
        x.copy_(z)
        return x + 1

    run = compiled(fn)
    for _ in range(3):
        mine = randn(300, 300)
        theirs = mine.clone()
        torch.testing.assert_close(run(mine), fn(theirs), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
