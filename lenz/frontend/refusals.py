"""Calls that fake tensors accept and eager's kernels reject: eager is called, and raises.

y = sub(mask, 1)   ==>   a call of aten.sub as it is: no parts, no loops
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg
from torch.utils import _pytree

from lenz.frontend.values import HALVES, hint_of

Refusal: TypeAlias = Callable[..., bool]  # takes the (fake) arguments of a call

BOOL = (torch.bool,)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _tensors(*args: Any) -> list[Tensor]:
    return [a for a in _pytree.tree_leaves(args) if isinstance(a, Tensor)]


def of(*kinds: torch.dtype) -> Refusal:
    """Some tensor has one of these types."""
    return lambda *args, **kwargs: any(t.dtype in kinds for t in _tensors(args, kwargs))


def only(*kinds: torch.dtype) -> Refusal:
    """All tensors have one of these types."""
    return lambda *args, **kwargs: all(t.dtype in kinds for t in _tensors(args, kwargs))


def bools(*args: Any, **_: Any) -> bool:
    """All operands are tensors of bools: a number would make the result integer or float."""
    return only(*BOOL)(*args) and not any(type(a) in (int, float) for a in args)


def _norm(x: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Weights and statistics have another type than x, other than f32 with half types."""
    kinds = {t.dtype for t in _tensors(args, kwargs)}
    return kinds not in (set(), {x.dtype}, {torch.float32} if x.dtype in HALVES else set())


def _other_than(part: Callable[..., Tensor]) -> Refusal:
    """The source has another shape than the part of `x` that it replaces.

    Other sizes than this call's may not fit, so this adds guards; a write by a view has them.
    """

    def rule(x: Tensor, src: Tensor, *args: Any, **kwargs: Any) -> bool:
        try:
            place = part(x, *args, **kwargs)
            return _sizes(place) != _sizes(src) and place.shape != src.shape
        except (IndexError, RuntimeError, ValueError, ZeroDivisionError):
            return True  # the part does not exist

    return rule


def _sizes(t: Tensor) -> list[Any]:
    """Sizes as expressions: what holds in this call alone may not hold in a later one."""
    return [_expr(n) for n in t.shape]


def _bare(t: Tensor) -> Tensor:
    """A tensor with this call's sizes, so that questions about it add no guards."""
    sizes = map(hint_of, t.shape)
    return torch.empty([1 if n is None else n for n in sizes], dtype=t.dtype, device="meta")


def _unfit(x: Tensor, places: Sequence[Tensor | None], src: Tensor, *_: Any, **__: Any) -> bool:
    """The indices do not broadcast together, or the source does not broadcast to them."""
    if any(i is not None and i.dtype in (*BOOL, *INTS[:1]) for i in places):
        return False  # a mask's number of elements is unknown
    try:
        at = tuple(slice(None) if i is None else _bare(i).long() for i in places)
        _bare(src).expand(_bare(x)[at].shape)
    except (IndexError, RuntimeError):
        return True
    return False


def _unmatched(x: Tensor, dim: int, at: Tensor, src: Tensor, *_: Any, **__: Any) -> bool:
    """The source's shape is not that of `x` with the index's size in the dimension."""
    want = _sizes(x)
    if want:
        want[dim] = _expr(at.numel())
    return want != _sizes(src)


def _unlike(x: Tensor, matrix: Tensor, y: Tensor, *_: Any, **__: Any) -> bool:
    """The matrix has not as many columns as `y` has numbers, or not as many rows as `x`."""
    rows, columns = _sizes(matrix)
    return _sizes(x) not in ([], [1], [rows]) or _sizes(y) != [columns]


def _several(x: Tensor, *args: Any, **_: Any) -> bool:
    """`x` has no dimension, and the tensors beside it are not all [], or all [1]."""
    return not x.dim() and {(*_sizes(t),) for t in _tensors(args)} not in ({()}, {(1,)})


def on_cpu(*kinds: torch.dtype) -> Refusal:
    """Some tensor has one of these types, on a CPU: GPUs have kernels for them."""
    return lambda *a, **_: any(t.dtype in kinds and t.device.type == "cpu" for t in _tensors(a))


def _lacks(x: Tensor, dim: Any) -> bool:
    """The tensor has no such dimension; a number has one."""
    return isinstance(dim, int) and not -max(x.dim(), 1) <= dim < max(x.dim(), 1)


def _overflows(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> bool:
    """An integer may not fit the type that it is written into, nor a float an integer type."""
    kind = dtype or next((t.dtype for t in _tensors(args)), None)
    if kind not in (*INTS, torch.float16):
        return False
    kinds = {torch.int64: (int, float), torch.float16: (int,)}.get(kind, (int, float, torch.SymInt))
    return _outside(kind, [a for a in (*args, *kwargs.values()) if type(a) in kinds])


def _beyond(kind: torch.dtype) -> Refusal:
    """An integer does not fit the type: a position or a stride may overflow."""
    return lambda *a, **_: _outside(kind, [n for n in _pytree.tree_leaves(a) if type(n) is int])


def _outside(kind: torch.dtype, numbers: Sequence[Any], past: int = 0) -> bool:
    """A number may lie outside the limits of a type; `past` of it are allowed above."""
    limits = (torch.finfo if kind.is_floating_point or kind.is_complex else torch.iinfo)(kind)
    low, high, known = limits.min, limits.max + past, statically_known_true
    return not all(known(low <= n) and known(n <= high) for n in numbers)


def _vanishes(x: Any, y: Any, **_: Any) -> bool:
    """A divisor is 0 in the type of `x`; kernels test sizes."""
    return type(y) is int and of(*INTS[:4])(x) and y % 256 ** x.element_size() == 0


def _undrawn(*args: Any, dtype: torch.dtype | None = None, **_: Any) -> bool:
    """Random integers do not fit their type; the range ends before its second number."""
    kind = next((k for k in (dtype, *(t.dtype for t in _tensors(args))) if k), torch.int64)
    ends = [a for a in args if isinstance(a, (int, torch.SymInt))]
    return kind in BOOL or _outside(kind, ends, 1)


def too_large(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> bool:
    """A finite number overflows in the type of the result, else of a float tensor or a new one.

    Or its inverse overflows, at least in f32: eager may take the number for 0.
    """
    kinds = (dtype, *(t.dtype for t in _tensors(args)), torch.get_default_dtype())
    most = next(torch.finfo(k).max for k in kinds if k and k.is_floating_point)
    numbers = [abs(a) for a in (*args, *kwargs.values()) if type(a) is float and a != 0.0]
    return any(most < a < math.inf or a * max(most, 1e38) < 1.0 for a in numbers)


def _narrows(x: Tensor, *args: Any, **_: Any) -> bool:
    """A number comes from a tensor, and may not fit the type of `x`."""
    return any(torch.promote_types(x.dtype, t.dtype) is not x.dtype for t in _tensors(args[-1:]))


_expr: Callable[[Any], Any] = lambda n: n.node.expr if isinstance(n, torch.SymInt) else n
mixed: Refusal = lambda *args, **kwargs: len({t.dtype for t in _tensors(args, kwargs)}) > 1
foreign: Refusal = lambda x, *args, **_: _tensors(args)[-1].dtype is not x.dtype
TRAINING = """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
_batch_norm_with_update _batch_norm_with_update_functional"""
NORMS = f"{TRAINING} _native_batch_norm_legit_no_training cudnn_batch_norm"
FILLED = """full full_like new_full fill scalar_tensor masked_fill index_fill scatter
constant_pad_nd threshold clamp clamp_min clamp_max hardtanh pow addcmul addmv addr index_add
linspace logspace"""
LISTS = "_foreach_add _foreach_sub _foreach_addcmul _foreach_clamp_min _foreach_clamp_max"
FLOATS = """frac lerp log_sigmoid_forward _log_softmax hardswish hardsigmoid
celu elu silu gelu mish softplus glu _prelu_kernel std var std_mean var_mean rrelu_with_noise
rrelu_with_noise_functional multinomial normal logcumsumexp im2col col2im adaptive_max_pool2d
adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d hardshrink softshrink _softmax
_safe_softmax smooth_l1_loss soft_margin_loss uniform bernoulli"""
NUMERIC = f"""abs sub rsub ceil floor trunc round relu mvlgamma threshold trace bucketize topk
searchsorted addcmul addcdiv addmv mv dist dot vdot kthvalue median nanmedian linalg_cross
argmax argmin max_pool2d_with_indices max_pool3d_with_indices
{" ".join(f"reflection_pad{n}d" for n in "123")}"""
FIRST = """nll_loss_forward nll_loss2d_forward huber_loss binary_cross_entropy_with_logits
max_unpool2d max_unpool3d max_pool2d_with_indices_backward max_pool3d_with_indices_backward
multi_margin_loss binary_cross_entropy rand randn rand_like randn_like"""
SPECIAL = """zeta ndtri log_ndtr erfcx airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1
modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 spherical_bessel_j0
scaled_modified_bessel_k0 scaled_modified_bessel_k1"""
CHEBYSHEV = [f"{s}chebyshev_polynomial_{kind}" for s in ("", "shifted_") for kind in "tuvw"]
WIDE = " ".join(f"special_{n}" for n in (*SPECIAL.split(), *CHEBYSHEV))
NLL = "nll_loss_forward nll_loss2d_forward"
PLACED = "index_select index_copy index_add index_reduce index_fill"
UPSAMPLED = """upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
upsample_trilinear3d upsample_bicubic2d"""
ORDERED = "_softmax _safe_softmax _log_softmax sort"
RULES: Sequence[tuple[str, Refusal]] = (  # a rule that is too broad only costs speed
    (f"{FLOATS} {NORMS}", of(*BOOL, *INTS)),
    (f"{WIDE} _cdist_forward _pdist_forward", of(*HALVES)),
    ("avg_pool3d rrelu_with_noise rrelu_with_noise_functional", on_cpu(*HALVES)),
    ("complex polar", of(torch.bfloat16)),
    ("nansum", on_cpu(torch.complex64, torch.complex128)),
    (FIRST, lambda x, *_, dtype=None, **__: (dtype or getattr(x, "dtype", 0)) in (*BOOL, *INTS)),
    (f"{NUMERIC} randint_like", of(*BOOL)),
    ("pow clamp floor_divide remainder fmod", bools),
    ("pow", only(torch.uint16, torch.uint32, torch.uint64)),
    ("div", lambda *a, rounding_mode=None: rounding_mode is not None and bools(*a)),
    ("add sub rsub", lambda *a, alpha=1: type(alpha) is float and only(*BOOL, *INTS)(*a)),
    ("add sub rsub", lambda *a, alpha=1: alpha is True and not only(*BOOL)(*a)),
    ("sub rsub", lambda *a, **_: any(type(n) is bool for n in a)),
    ("ldexp", lambda x, e: x.is_floating_point() and e.dtype is torch.bool),
    ("mse_loss", only(*BOOL, *INTS)),
    ("log_sigmoid_forward clamp clamp_min le lt ge gt", of(torch.complex64, torch.complex128)),
    ("binary_cross_entropy_with_logits", lambda _, y, *a, **__: of(*INTS)(y) or of(*BOOL)(y, a)),
    ("arange linspace logspace", lambda *a, dtype=None, **_: dtype in BOOL or bool(_tensors(a))),
    ("logaddexp logaddexp2", lambda x, y: {x.dtype, y.dtype} <= {*BOOL, *INTS}),
    ("round", lambda *a, decimals=None: decimals is not None and of(*INTS)(*a)),
    (UPSAMPLED, of(*BOOL, *INTS[1:], torch.complex64, torch.complex128)),
    (UPSAMPLED, lambda x, sizes, *_: 0 in (*_sizes(x)[1:], *map(hint_of, sizes))),
    ("upsample_linear1d upsample_trilinear3d", of(torch.uint8)),
    ("upsample_bilinear2d upsample_bicubic2d", lambda x, *_: of(torch.uint8)(x) and not x.is_cpu),
    ("complex polar heaviside linalg_cross mv addmv _cdist_forward binary_cross_entropy", mixed),
    ("grid_sampler_2d grid_sampler_3d block_diag", mixed),
    (f"native_layer_norm native_group_norm {NORMS}", _norm),
    (f"{NORMS} native_group_norm", lambda _, *a, **k: any(t.dim() != 1 for t in _tensors(a, k))),
    (FILLED, _overflows),
    ("add sub rsub", lambda *a, **k: _overflows(*_tensors(a[:2]), *a[2:], **k)),
    ("where", lambda _, *a, **__: _overflows(*a)),
    ("floor_divide remainder fmod div", _vanishes),
    ("logspace", lambda _, b, n, base=10.0, **__: not statically_known_true(base >= 0)),
    (LISTS, lambda *a, **k: _overflows(*_pytree.tree_leaves((a, k)))),
    ("randint randint_like", _undrawn),
    ("uniform", lambda x, a=0.0, b=1.0, **_: _outside(x.dtype, [b - a])),
    ("smooth_l1_loss", lambda x, y, reduction=1, beta=1.0: not statically_known_true(beta >= 0)),
    ("mvlgamma", lambda _, p: p < 1),
    ("celu", lambda _, alpha=1.0: statically_known_true(alpha == 0)),
    ("masked_fill index_fill", _narrows),
    ("addmv", _unlike),
    ("soft_margin_loss", lambda x, y, *_: _sizes(x) != _sizes(y)),
    ("binary_cross_entropy", lambda x, *a, **_: any(t.dim() > x.dim() for t in _tensors(a))),
    (ORDERED, lambda x, *a, dim=None, **_: _lacks(x, dim if dim is not None or not a else a[0])),
    # Nothing to average or to choose; and any view fits an empty tensor.
    (f"{TRAINING} median nanmedian pixel_unshuffle", lambda x, *a, **k: 0 in map(hint_of, x.shape)),
    ("avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices", _beyond(torch.int32)),
    ("tril triu tril_indices triu_indices", _beyond(torch.int32)),
    ("empty_strided new_empty_strided as_strided_scatter im2col col2im", _beyond(torch.uint32)),
    ("bucketize", lambda x, edges, *_, **__: edges.dim() != 1),
    ("searchsorted", lambda *_, side=None, **__: side not in (None, "left", "right")),
    ("searchsorted", lambda *_, sorter=None, **__: sorter is not None and sorter.dtype != INTS[4]),
    ("gather scatter scatter_add scatter_reduce", _several),
    ("scatter_reduce", lambda x, dim, at, new, how, **_: how == "mean" and of(*BOOL)(x)),
    (f"{PLACED} cummax cummin", lambda x, dim, *_, **__: _lacks(x, dim)),
    (PLACED, lambda x, _, at, *a, **k: at.dim() > 1 or (not x.dim() and hint_of(at.numel()) != 1)),
    ("index_fill index_copy", lambda x, dim, at, *_, **__: at.dtype is not torch.int64),
    ("index_fill", lambda x, *a, **_: any(t.is_complex() for t in _tensors(a)) > x.is_complex()),
    ("index_add index_reduce index_copy", _unmatched),
    ("index_put _unsafe_index_put", _unfit),
    ("put index_copy index_add index_reduce index_put _unsafe_index_put", foreign),
    ("put", lambda x, at, new, *_, **__: _expr(at.numel()) != _expr(new.numel())),
    ("diagonal_scatter", _other_than(Tensor.diagonal)),
    ("select_scatter", _other_than(Tensor.select)),
    ("slice_scatter", _other_than(torch.ops.aten.slice.Tensor)),
    (NLL, lambda x, y, *_, **__: y.dtype in (*BOOL, *INTS[1:4])),
    (NLL, lambda x, y, w, *_: w is not None and w.dtype is not x.dtype),
    ("nll_loss2d_forward", lambda x, y, *_: _sizes(x)[:1] + _sizes(x)[2:] != _sizes(y)),
)
REFUSED: Mapping[str, Sequence[Refusal]] = {  # by the name of an aten packet
    name: [rule for names, rule in RULES if name in names.split()]
    for name in dict.fromkeys(" ".join(names for names, _ in RULES).split())
}


def is_refused(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Say whether eager may reject a call of the op with these (fake) arguments."""
    return any(rule(*args, **kwargs) for rule in (too_large, *REFUSED.get(name, ())))


def kept_whole(packet: str, rule: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition that leaves calls alone that eager may reject."""
    name = packet.removeprefix("aten.")
    return lambda *a, **kw: NotImplemented if is_refused(name, a, kw) else rule(*a, **kw)


def mark_refused(gm: GraphModule) -> None:
    """Mark each call that eager may reject: `meta["refused"]`."""
    for n in gm.graph.nodes:
        if isinstance(n.target, torch._ops.OpOverload):
            given = map_arg((n.args, n.kwargs), lambda a: a.meta.get("val"))
            if is_refused(n.target._opname, *given):
                n.meta["refused"] = True
