"""Layer, group, batch and RMS normalisation.

Statistics are f32 for half inputs and f32, f64 for f64.  The variance of a row or a group is
computed in two passes, mean first: the second pass finds the data in cache, or in registers on GPUs
(moments.py).  Batch statistics read the whole tensor once per pass. So on CPUs, and for unknown
               sizes, inputs up to f32 use two f64 sums in one pass, of x and of x^2. Squares of f32
               values have a relative error of 2^-53 in f64, so sum(x^2) - sum(x)^2/n is as good as
               two passes in f32 while |mean| < 10^4 * deviation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lenz import ops
from lenz.errors import InternalError, Unsupported
from lenz.ir.dtype import F64, DType, compute_dtype
from lenz.ir.expr import Expr, const
from lenz.ir.tensor import TensorType, axes_for
from lenz.lower.builder import At, Decline, Fn, GraphBuilder, Index, Value
from lenz.lower.dims import count, cut, reduce_over, sum_rows
from lenz.lower.moments import Sets, Types, moments
from lenz.lower.operand import Size, Sizes, reader
from lenz.lower.registry import lowering
from lenz.machines import runs_programs
from lenz.records import dataclass, replace
from lenz.sym import ONE, ZERO, Sym, affine_in, product, prove_divides, sym


def rounded(b: GraphBuilder, x: Value, type: TensorType, name: str) -> Value:
    """`x` itself if it has the type, else a converted copy."""
    return x if x.dtype is type.dtype else b.map(x.at, type, name)


def scaled(
    e: Expr, weight: Value | None, bias: Value | None, index: Index, or_zero: bool = False
) -> Expr:
    """e * weight + bias, if given, in the type of e; with `or_zero` a missing bias is 0.0."""
    if weight is not None:
        e = e * ops.cast(weight.compute(index), e.dtype)
    if bias is not None:
        e = e + ops.cast(bias.compute(index), e.dtype)
    return e + 0 if or_zero and bias is None else e


@dataclass(frozen=True, slots=True)
class Groups:
    """[N, C, ...] cut into groups of C/G channels: statistics have the shape [N, G]."""

    shape: tuple[Sym, ...]
    group: Sym

    @property
    def rows(self) -> tuple[Sym, ...]:
        """[N, G]."""
        return (self.shape[0], self.group)

    @property
    def width(self) -> Sym:
        """Channels per group."""
        return self.shape[1] // self.group

    @property
    def over(self) -> tuple[Sym, ...]:
        """[C/G, ...]: the elements of one group."""
        return (self.width, *self.shape[2:])

    def join(self, row: Index, r: Index) -> Index:
        """Index in [N, C, ...] of the element r of the group of a row."""
        return (row[0], row[1] * self.width + r[0], *r[1:])

    def row(self, i: Index) -> Index:
        """[n, g] of the element [n, c, ...]."""
        return (i[0], i[1] // self.width)

    def is_beside(self, b: GraphBuilder, x: Value) -> bool:
        """True if a CPU's memory has the channels of a group side by side, again for each place."""
        axes = axes_for(self.shape)
        step = affine_in(b.flat(x, tuple(a.var for a in axes)), axes[1].var)
        alone = runs_programs(x.device) or self.width is ONE or product(self.shape[2:]) is ONE
        return not alone and step is not None and step[0] is ONE

    def per_channel(self, b: GraphBuilder, x: Value, v: Value) -> At:
        """The statistic of each element's group; a copy for each channel if these lie together."""
        if not self.is_beside(b, x):
            return lambda i: v.at(self.row(i))
        copies = b.map(lambda i: v.at(self.row(i)), b.temp(self.shape[:2], v.dtype, x), "channel")
        return lambda i: copies.at(i[:2])


def group_of(shape: Sequence[Sym], channels: Size, group: Size) -> Groups:
    """The groups; declines an input whose dimension 1 is not the channels."""
    if len(shape) < 2 or shape[1] is not sym(channels):
        raise Decline("group norm of an input whose dimension 1 is not the channels")
    return Groups(tuple(shape), sym(group))


@lowering("native_layer_norm")
def native_layer_norm(
    b: GraphBuilder,
    x: Value,
    normalized_shape: Sizes,
    weight: Value | None,
    bias: Value | None,
    eps: float,
) -> tuple[Value, Value, Value]:
    """(x - mean) / sqrt(var + eps) over the last dimensions, times weight, plus bias.

    Also returns the mean and 1/sqrt(var + eps) of each row, with size 1 for normalised dimensions.
    """
    lead = x.rank - len(normalized_shape)
    if ZERO in x.shape[lead:]:
        raise Decline("the norm of an empty tensor")
    s = cut(x.shape, tuple(range(lead, x.rank)))
    sets = Sets(x, s.padded, s.over, lambda i, r: s.join(s.row(i), r))

    # Eager adds 0.0 for a missing bias, which changes -0.0; its vectors of 4 on GPUs do not.
    whole = x.device != "cpu" and prove_divides(4, product(s.over)) and x.dtype is not F64
    shifted = lambda e, i: scaled(e, weight, bias, i[lead:], or_zero=not whole)
    return _normalised(b, sets, eps, lambda v: lambda i: v.at(s.pad(s.row(i))), shifted)


def _normalised(
    b: GraphBuilder,
    s: Sets,
    eps: float,
    per: Callable[[Value], At],
    shifted: Callable[[Expr, Index], Expr],
    by_channel: bool = False,
) -> tuple[Value, Value, Value]:
    """shifted((x - mean) / sqrt(var + eps)), and the mean and 1/sqrt(var + eps) of each set.

    `per` gives the statistic of an element. `by_channel`: sums of channels come first.
    """
    n = count(s.over, s.dtype)
    types = replace(b.kind(1), dtype=s.dtype), replace(b.kind(2), dtype=s.dtype)
    rstd = lambda squares: ops.rsqrt(squares / ops.cast(n, squares.dtype) + eps)
    of = _channel_moments if by_channel else moments
    mean, factor = of(b, s, types, rstd, "rstd")
    mean_at, factor_at = per(mean), per(factor)
    y = b.map(lambda i: shifted((s.x.compute(i) - mean_at(i)) * factor_at(i), i))
    return y, rounded(b, mean, b.kind(1), "mean"), rounded(b, factor, b.kind(2), "rstd")


@lowering("native_group_norm")
def native_group_norm(
    b: GraphBuilder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    N: Size,
    C: Size,
    HxW: Size,
    group: Size,
    eps: float,
) -> tuple[Value, Value, Value]:
    """Normalisation over groups of channels of [N, C, ...], scale and shift per channel."""
    if ZERO in x.shape[1:] or (sym(N), sym(HxW)) != (*x.shape[:1], product(x.shape[2:])):
        raise Decline("the norm of an empty tensor, or by sizes that are not its own")
    s = group_of(x.shape, C, group)
    shifted = lambda e, i: scaled(e, weight, bias, (i[1],))
    sets, per = Sets(x, s.rows, s.over, s.join), lambda v: s.per_channel(b, x, v)
    return _normalised(b, sets, eps, per, shifted, s.is_beside(b, x) and sets.dtype is not F64)


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Per channel: the mean, and sum((x - mean)^2) as a function of the channel index."""

    mean: Value
    squares: At
    n: tuple[Sym, ...]


def _in_one_pass(
    b: GraphBuilder, s: Sets, type: TensorType, total: Callable[[At, str], Value]
) -> tuple[Value, At]:
    """The mean of each set, and sum((x - mean)^2), from its sums of x and x^2.

    `total` adds up a function of the elements of each set.
    """
    n, at = count(s.over, F64), reader(s.x, F64)
    x, square = total(at, "total"), total(lambda i: ops.square(at(i)), "total_sq")
    mean = b.map(lambda i: x.at(i) / n, type, "mean")
    return mean, lambda i: ops.maximum(square.at(i) - ops.square(x.at(i)) / n, 0.0)


def _channel_moments(
    b: GraphBuilder, s: Sets, types: Types, finish: Fn, name: str
) -> tuple[Value, Value]:
    """`moments` of groups of channels, from sums of each channel."""
    whole, made = cut(s.x.shape, tuple(range(2, s.x.rank))), b.temp(s.rows, F64, s.x)

    def total(fn: At, name: str) -> Value:
        sums = sum_rows(b, whole, fn, F64, "sums")
        channel = lambda i, r: sums.at(s.join(i, r)[:2])
        return b.reduce("sum", s.rows, s.over[:1], channel, None, made, name)

    mean, squares = _in_one_pass(b, s, types[0], total)
    return mean, b.map(lambda i: finish(squares(i)), types[1], name)


def channel_statistics(b: GraphBuilder, x: Value) -> ChannelStatistics:
    """Statistics over all dimensions but dimension 1, computed as the top of this file says."""
    s = cut(x.shape, tuple(d for d in range(x.rank) if d != 1))
    acc = compute_dtype(x.dtype)
    mean_type = b.temp(s.rows, acc)
    sets = Sets(x, s.rows, s.over, s.join)
    if acc is F64 or (runs_programs(x.device) and sets.is_static):
        mean, squares = moments(b, sets, (mean_type, mean_type), lambda a: a, "squares")
        return ChannelStatistics(mean, squares.at, s.over)
    total = lambda fn, name: sum_rows(b, s, fn, F64, name)
    return ChannelStatistics(*_in_one_pass(b, sets, mean_type, total), s.over)


@dataclass(frozen=True, slots=True)
class BatchNorm:
    """Arguments of one batch normalisation."""

    x: Value
    weight: Value | None
    bias: Value | None
    running_mean: Value | None
    running_var: Value | None
    momentum: float
    eps: float

    @property
    def acc(self) -> DType:
        """Type of the statistics while they are computed."""
        return compute_dtype(self.x.dtype)

    def apply(self, b: GraphBuilder, mean: Value, invstd: Value) -> Value:
        """(x - mean) * (invstd * weight) + bias."""

        def out(i: Index) -> Expr:
            c = (i[1],)
            centred = self.x.compute(i) - ops.cast(mean.compute(c), self.acc)
            factor = scaled(ops.cast(invstd.compute(c), self.acc), self.weight, None, c)
            return scaled(centred * factor, None, self.bias, c, or_zero=True)

        return b.map(out)

    def train(self, b: GraphBuilder) -> tuple[Value, Value, Value, ChannelStatistics]:
        """Normalise by the statistics of the batch: (out, save_mean, save_invstd, statistics)."""
        stats = channel_statistics(b, self.x)

        def invstd_of(i: Index) -> Expr:
            squares = stats.squares(i)
            var = squares / count(stats.n, squares.dtype)
            return ops.cast(ops.rsqrt(var + self.eps), self.acc)

        invstd = b.map(invstd_of, replace(b.kind(2), dtype=self.acc), "invstd")
        y = self.apply(b, stats.mean, invstd)
        save_mean = rounded(b, stats.mean, b.kind(1), "save_mean")
        return y, save_mean, rounded(b, invstd, b.kind(2), "save_invstd"), stats

    def evaluate(self, b: GraphBuilder) -> tuple[Value, Value, Value]:
        """Normalise by the running statistics; eager saves empty tensors (or the same ones)."""
        mean, var = self.running
        invstd = invstd_of(b, var, self.eps, b.temp(var.shape, self.acc))
        return self.apply(b, mean, invstd), self.saved(b, mean, 1), self.saved(b, invstd, 2)

    @property
    def running(self) -> tuple[Value, Value]:
        """The running mean and variance."""
        if self.running_mean is None or self.running_var is None:
            raise InternalError("batch norm has no running statistics")
        return self.running_mean, self.running_var

    def saved(self, b: GraphBuilder, value: Value, position: int) -> Value:
        """An empty result on CPUs, elsewhere the statistics used."""
        type = b.kind(position)
        if type.shape and type.shape[0] is ZERO:
            return b.map(lambda i: const(0, type.dtype), type, "saved")
        return b.map(value.compute, type, "saved")

    def updated(self, b: GraphBuilder, stats: ChannelStatistics, first: int) -> tuple[Value, Value]:
        """New running statistics: momentum * new + (1 - momentum) * old, unbiased variance."""
        mean, var = self.running

        def mixed(old: Expr, new: Expr) -> Expr:
            return self.momentum * ops.cast(new, old.dtype) + (1.0 - self.momentum) * old

        def unbiased(i: Index) -> Expr:
            squares = stats.squares(i)
            return squares / (count(stats.n, squares.dtype) - 1)

        def moved(old: Value, new: At, position: int, name: str) -> Value:
            return b.map(lambda i: mixed(old.compute(i), new(i)), b.kind(position), name)

        new_mean = moved(mean, stats.mean.at, first, "running_mean")
        return new_mean, moved(var, unbiased, first + 1, "running_var")


def invstd_of(b: GraphBuilder, var: Value, eps: float, type: TensorType) -> Value:
    """1 / sqrt(var + eps)."""
    return b.map(lambda i: ops.rsqrt(ops.cast(var.compute(i), type.dtype) + eps), type, "invstd")


def _given(args: Sequence[Any]) -> tuple[BatchNorm, bool]:
    """The arguments of an op in aten's order: `training` comes after the tensors."""
    x, weight, bias, mean, var, training, momentum, eps = args
    return BatchNorm(x, weight, bias, mean, var, momentum, eps), training


@lowering("_native_batch_norm_legit_functional")
def batch_norm_functional(b: GraphBuilder, *args: Any) -> tuple[Value, ...]:
    """Batch normalisation that returns the new running statistics as results 3 and 4."""
    op, training = _given(args)
    if not training:
        return (*op.evaluate(b), *args[3:5])
    *three, stats = op.train(b)
    return (*three, *op.updated(b, stats, 3))


@lowering("_batch_norm_with_update_functional")
def batch_norm_with_update_functional(b: GraphBuilder, *args: Any) -> tuple[Value, ...]:
    """The same in training mode; result 3 is the library's reserve, empty here."""
    op = BatchNorm(*args)
    reserve_type = b.kind(3)
    if not any(s is ZERO for s in reserve_type.shape):
        raise InternalError("batch norm with a reserve that is not empty")
    *three, stats = op.train(b)
    reserve = b.map(lambda i: const(0, reserve_type.dtype), reserve_type, "reserve")
    return (*three, reserve, *op.updated(b, stats, 4))


# By the running statistics; without them, always by those of the batch.
lowering("_native_batch_norm_legit_no_training")(lambda b, *args: BatchNorm(*args).evaluate(b))
lowering("_native_batch_norm_legit.no_stats")(
    lambda b, *args: _given((*args[:3], None, None, *args[3:]))[0].train(b)[:3]
)


@lowering("native_batch_norm")
def batch_norm(b: GraphBuilder, *args: Any) -> tuple[Value, Value, Value]:
    """The form that may write running statistics, which a functional graph does not have.

    Raises Unsupported for it: the op's schema does not say that it writes.
    """
    op, training = _given(args)
    if not training:
        return op.evaluate(b)
    if op.running_mean is not None or op.running_var is not None:
        raise Unsupported("native_batch_norm writes its running statistics without saying so")
    return op.train(b)[:3]


@lowering("_fused_rms_norm")
def fused_rms_norm(
    b: GraphBuilder, x: Value, normalized_shape: Sizes, weight: Value | None, eps: float | None
) -> tuple[Value, Value]:
    """x / sqrt(mean(x^2) + eps) over the last dimensions, times weight; also the factor per row.

    eps defaults to the machine epsilon of the compute type.
    """
    lead = x.rank - len(normalized_shape)
    s = cut(x.shape, tuple(range(lead, x.rank)))
    acc = compute_dtype(x.dtype)
    n = count(s.over, acc)
    small = const(torch.finfo(acc.torch).eps if eps is None else eps, acc)
    factor = lambda squares: ops.rsqrt(squares / n + small)
    made = replace(b.kind(1), dtype=acc)
    rstd = reduce_over(b, "sum", s, True, lambda i: ops.square(x.compute(i)), factor, made, "rstd")
    normal: At = lambda i: x.compute(i) * rstd.at(s.pad(s.row(i)))
    y = b.map(lambda i: scaled(normal(i), weight, None, i[lead:]))
    return y, rounded(b, rstd, b.kind(1), "rstd")
