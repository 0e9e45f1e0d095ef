"""The kernel cases of the GPU benchmarks: what is computed, on what, and the bytes it must move.

Tensors are bf16 unless said.  Weights and inputs are random; a gradient that comes from above is
random as well.  The bytes of a case are the fewest that any program has to move: every input read
once and every result written once, plus what its comment says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

BF16, F32, F8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
F8_MAX = 448.0
DROP = 0.1
Args = tuple[Tensor, ...]


def size(*tensors: Any) -> int:
    """Bytes of all tensors in some structures."""
    leaves = [t for t in tree_leaves(tensors) if isinstance(t, Tensor)]
    return sum(t.numel() * t.element_size() for t in leaves)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arguments of one call, and the gradient of its result where the call runs backward."""

    args: Args
    upstream: Tensor | None = None


def moved(i: Inputs, result: Any) -> int:
    """Inputs once and results once; with a gradient from above, the inputs again for backward.

    `result` of a backward case is (result, gradients); arguments that are written are in it too.
    """
    return size(i.args) * (1 if i.upstream is None else 2) + size(i.upstream, result)


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel.

    full, tiny  what `make` is called with on a GPU, and to check the harness
    backward    the gradients of all arguments that want one are part of the call
    mutates     it stores into its arguments, which are then results, and shared by no two sides
    nbytes      the fewest bytes to move, from the inputs and the results
    tol         largest error allowed against float64, relative to the largest magnitude
    judge       replaces the comparison with float64, for random results: error from inputs, result
    """

    name: str
    fn: Callable[..., Any]
    full: tuple[int, ...]
    tiny: tuple[int, ...]
    make: Callable[..., Args]
    backward: bool = False
    mutates: bool = False
    nbytes: Callable[[Inputs, Any], int] = moved
    tol: float = 1e-2
    judge: Callable[[Inputs, Any], float] | None = None

    def inputs(self, tiny: bool) -> Inputs:
        """Seeded inputs on torch's current default device."""
        torch.manual_seed(0)
        args = self.make(*(self.tiny if tiny else self.full))
        if not self.backward:
            return Inputs(args)
        out = self.fn(*(a.detach().clone() for a in args))
        return Inputs(args, torch.randn_like(out) if out.dim() else torch.ones_like(out))

    def call(self, fn: Callable[..., Any], i: Inputs) -> Any:
        """The results of one call of `fn` in the place of the case's function."""
        out = fn(*i.args)
        if self.backward:
            wanted = [a for a in i.args if a.requires_grad]
            out = out.detach(), torch.autograd.grad(out, wanted, i.upstream)
        if self.mutates:
            out = out, [a.detach() for a in i.args if not a.requires_grad]
        return out


def normal(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def adam(w16: Tensor, g16: Tensor, m: Tensor, v: Tensor, w32: Tensor) -> None:
    """One step of Adam: f32 state and master weights, bf16 gradient and weights."""
    g32 = g16.to(torch.float32)
    m_new = 0.9 * m + (1 - 0.9) * g32
    v_new = 0.99 * v + (1 - 0.99) * (g32 * g32)
    w_new = w32 - (0.001 * m_new) / (torch.sqrt(v_new) + 1e-5)
    w16.copy_(w_new)
    m.copy_(m_new)
    v.copy_(v_new)
    w32.copy_(w_new)


def adam_args(n: int) -> Args:
    w32 = torch.randn(n)
    return w32.to(BF16), normal(n), torch.rand(n), torch.rand(n), w32


def adam_lists(*tensors: Tensor) -> None:
    """The same for many parameters, as `torch.optim` does it, with ops on lists."""
    w16, g16, m, v, w32 = (list(tensors[k::5]) for k in range(5))
    g32 = [g.to(x.dtype) for g, x in zip(g16, m, strict=True)]
    torch._foreach_lerp_(m, g32, 0.1)
    torch._foreach_mul_(v, 0.99)
    torch._foreach_addcmul_(v, g32, g32, 0.01)
    denominator = torch._foreach_sqrt(v)
    torch._foreach_add_(denominator, 1e-5)
    torch._foreach_addcdiv_(w32, m, denominator, -0.001)
    torch._foreach_copy_(w16, w32)


def adam_lists_args(layers: int, n: int) -> Args:
    """Weights of about n elements, no two layers alike, and biases of 256."""
    sizes = [size for k in range(layers) for size in (n + 8 * k, 256)]
    return tuple(t for size in sizes for t in adam_args(size))


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def residual_norm_gelu(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = x + r
    return h, F.gelu(F.layer_norm(h, (h.shape[-1],), w, b))


def transpose_add_relu(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x.t() + y)


def column_squares(x: Tensor) -> Tensor:
    return x.float().square().sum(0)


def rms_rotary(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [batch, length, heads * 128]; cos, sin: [length, 1, 128]."""
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
    q = (h.to(x.dtype) * w).view(*x.shape[:-1], -1, cos.shape[-1])
    a, b = q.chunk(2, -1)
    return q * cos + torch.cat([-b, a], -1) * sin


def rms_rotary_args(batch: int, length: int, width: int) -> Args:
    angle = torch.rand(length, 1, 128) * 6.0
    return normal(batch, length, width), normal(width), angle.cos().to(BF16), angle.sin().to(BF16)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x, 32, w, b)


def cumsum(x: Tensor) -> Tensor:
    return x.cumsum(-1)


def dropout_residual(x: Tensor, r: Tensor) -> Tensor:
    return F.dropout(x, DROP, training=True) + r


def dropout_error(i: Inputs, got: Tensor) -> float:
    """Each element is r or r + x / (1 - p), and the share kept is 1 - p where that can be told."""
    x, r = (t.double() for t in i.args)
    y, kept = got.double(), r + x / (1 - DROP)
    is_kept = (y - kept).abs() < (y - r).abs()
    off = (y - torch.where(is_kept, kept, r)).abs().nan_to_num(float("inf"))
    told = x.abs() > 0.5
    share = float(is_kept[told].double().mean())
    return max(float(off.max() / kept.abs().max()), abs(share - (1 - DROP)))


def embedding_backward(grad: Tensor, index: Tensor, table: Tensor) -> Tensor:
    """The gradient of an embedding table, as autograd asks for it."""
    aten = torch.ops.aten
    made: Tensor = aten.embedding_dense_backward(grad, index, table.shape[0], -1, False)
    return made


def embedding_args(tokens: int, vocabulary: int, width: int) -> Args:
    index = torch.randint(0, vocabulary, (tokens,))
    return normal(tokens, width), index, torch.zeros(vocabulary, 1)


def geglu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return a * F.gelu(b)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 with a scale per row; returns the numbers and what they are to be multiplied with."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / F8_MAX
    return (x.float() / scale).clamp(-F8_MAX, F8_MAX).to(F8), scale


def batch_norm(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.batch_norm(x, mean, var, w, b, training=True)


def batch_norm_args(layout: torch.memory_format) -> Callable[..., Args]:
    """x in a layout, with f32 weights and running statistics, which the call updates."""

    def make(n: int, c: int, h: int, w: int) -> Args:
        x = normal(n, c, h, w).to(memory_format=layout).requires_grad_()
        weight, bias = normal(c, dtype=F32, grad=True), normal(c, dtype=F32, grad=True)
        return x, weight, bias, torch.zeros(c), torch.ones(c)

    return make


def batch_norm_bytes(i: Inputs, result: Any) -> int:
    """A channel's sums come before any of its results, and a channel is larger than what one
    multiprocessor holds: so x is read twice in forward, x and the gradient twice in backward."""
    return moved(i, result) + 2 * size(i.args[0]) + size(i.upstream)


def concat_pad(a: Tensor, b: Tensor) -> Tensor:
    return F.pad(torch.cat([a, b], -1), (64, 128))


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


def layer_norm_args(rows: int, columns: int) -> Args:
    return normal(rows, columns, grad=True), normal(columns, grad=True), normal(columns, grad=True)


def total_and_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(dtype=torch.float32), x.mean(dtype=torch.float32)


def argmax(x: Tensor) -> Tensor:
    return x.argmax(-1)


def bias_gelu(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b)


def causal_softmax(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    kept = torch.ones(n, n, dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~kept, float("-inf")).softmax(-1)


def causal_bytes(i: Inputs, result: Any) -> int:
    """Half of the scores are never needed; every result is written."""
    n = i.args[0].shape[-1]
    return size(i.args) * (n + 1) // (2 * n) + size(result)


def middle_sum(x: Tensor) -> Tensor:
    return x.sum(1)


def one(*shape: int) -> Args:
    return (normal(*shape),)


def two(*shape: int) -> Args:
    return normal(*shape), normal(*shape)


def norm_args(rows: int, columns: int) -> Args:
    return (*two(rows, columns), normal(columns), normal(columns))


# The first five are those of the first measurements, see benchmarks/README.md.
CASES = [
    Case("Adam", adam, (100_000_000,), (4099,), adam_args, mutates=True,
         nbytes=lambda i, _: 28 * i.args[0].numel()),  # reads 4+4+4+2, writes 4+4+4+2
    Case("Adam of 120 parameters", adam_lists, (60, 65536), (3, 300), adam_lists_args, mutates=True,
         nbytes=lambda i, _: sum(28 * w.numel() for w in i.args[::5])),
    Case("softmax", softmax, (8192, 8192), (16, 200), one),
    Case("residual + layer_norm + gelu", residual_norm_gelu, (8192, 4096), (16, 200), norm_args),
    Case("transpose + add + relu", transpose_add_relu, (8192, 8192), (40, 40), two),
    Case("column sum of squares", column_squares, (32768, 4096), (300, 40), one, tol=1e-5),
    Case("RMS norm + rotary", rms_rotary, (4, 2048, 4096), (2, 7, 256), rms_rotary_args),
    Case("cross-entropy fwd+bwd", cross_entropy, (8192, 50257), (33, 257),
         lambda n, c: (normal(n, c, grad=True), torch.randint(0, c, (n,))), backward=True),
    Case("group norm", group_norm, (32, 256, 64, 64), (2, 64, 5, 5),
         lambda n, c, h, w: (normal(n, c, h, w), normal(c), normal(c))),
    Case("cumsum f32", cumsum, (4096, 16384), (5, 300),
         lambda r, c: (normal(r, c, dtype=F32),), tol=1e-5),
    Case("dropout + residual", dropout_residual, (8192, 8192), (256, 256), two, tol=2e-2,
         judge=dropout_error),
    Case("embedding backward", embedding_backward, (16384, 50257, 768), (50, 101, 24),
         embedding_args, nbytes=lambda i, out: size(i.args[:2], out)),
    Case("GEGLU", geglu, (8192, 16384), (16, 128), one),
    # One step of fp8 at the top is 32 of 448: float64 may round to the other neighbour.
    Case("quantize to fp8 by rows", quantize, (8192, 8192), (16, 200), one, tol=0.08),
    Case("batch norm fwd+bwd NCHW", batch_norm, (64, 256, 56, 56), (3, 8, 5, 5),
         batch_norm_args(torch.contiguous_format), backward=True, mutates=True,
         nbytes=batch_norm_bytes),
    Case("batch norm fwd+bwd channels_last", batch_norm, (64, 256, 56, 56), (3, 8, 5, 5),
         batch_norm_args(torch.channels_last), backward=True, mutates=True,
         nbytes=batch_norm_bytes),
    Case("concat + pad", concat_pad, (8192, 3000, 5000), (9, 20, 30),
         lambda r, a, b: (normal(r, a), normal(r, b)), tol=0.0),
    Case("layer_norm fwd+bwd", layer_norm, (8192, 4096), (16, 200), layer_norm_args, backward=True),
    # Uniform numbers: a sum of normal ones may be next to 0, which is no scale for an error.
    Case("global sum and mean", total_and_mean, (1 << 28,), (5000,),
         lambda n: (torch.rand(n).to(BF16),), tol=1e-5),
    Case("argmax", argmax, (4096, 32768), (16, 300), one, tol=0.0),
    Case("bias + gelu", bias_gelu, (8192, 16384), (16, 200),
         lambda r, c: (normal(r, c), normal(c))),
    Case("causal softmax", causal_softmax, (32, 2048, 2048), (2, 40, 40), one,
         nbytes=causal_bytes),
    Case("sum over the middle dim", middle_sum, (128, 512, 2048), (3, 50, 40), one),
]  # fmt: skip
