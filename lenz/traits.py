"""What lenz knows about each op of torch by name: one table with one entry per op.

Lowerings say what ops compute; `frontend/refusals.py` says what eager rejects.  Traits:

library     a library call that our code does not beat: never decomposed
parts       decomposed, although torch's core table leaves it whole
view        gives elements of its first argument in another shape or order
views       the same, as a list of tensors
alias       gives its first argument
copy        copies its first argument
across      may take tensors of other devices
replayed=s  a CUDA graph may hold it, although its numbers are random: their seed is in the GPU's
            memory, and is "drawn" or "given"
unset       gives uninitialised memory
fill        gives one number everywhere
offset      counts from the start of a storage
gives       gives the memory of an argument to another, as `x.data = y` does
size        gives a size or a stride of a tensor
compare     compares two tensors
put         writes at the indices in other tensors
places=n    the second result holds indices in the last n dimensions
choice=n    the second result holds indices in the dimension named by argument n
product=n   a matrix product whose first factor is argument n; an addend precedes it
into        has an out= form that writes every element
type=t      fake results have a wrong type: result 0 has that of an argument ("0", "1") or of all
            together ("all"), or results 1 and 2 have the latter on CPUs ("statistics"), or result 1
            is double for doubles ("log_sum", f32 in torch 2.11)

Complex tensors, as pairs of real ones:

linear      the results are sums of elements times real numbers
memory      works on the memory itself
ones        gives ones, whose imaginary parts are 0
torn        GPU threads that write to the same place would mix parts of different numbers
truth       only tests whether an element is zero
norm        takes the absolute value of an element

Strides of the first result, where those of fake tensors differ from eager's (see `strides.py`):

strides=k   the rule; elementwise ops have "iteration" by their tag, unless it is "told"
of=n        the argument that decides, 0 if not given
reversed    the iteration takes the operands in another order
twins       the second result has the strides of the first

    dense      always contiguous
    here       contiguous, on CPUs alone
    there      contiguous, on GPUs alone
    format     the memory format that ATen suggests for an argument (measured on CPUs alone)
    laid       channels last also where the argument is so and ATen does not say it, but not where
               it is contiguous as well (CPUs)
    either     channels last if one of the two is (CPUs)
    groups     such a format on CPUs, contiguous on GPUs
    like       an argument without its gaps
    iteration  an iteration over all operands
    among      the same, where one operand is a number, as a tensor
    power      the same, with the power of a number as a dense operand
    roll       the format of the argument if each step joins two parts; dense if one part is empty
    spread     the fake strides, gaps and all; contiguous if one is 0
    cut        a copy of the unpadded part: torch has no rule for symbolic widths of 0
    told       fake tensors are right, although the op is elementwise by its tag
    fourier    as MKL's transform leaves them
    index      an iteration over the indices and the indexed tensor
    view       as ATen's `computeStride` or `expand` gives them
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

# Ops are written without "aten." and ".default". A name without an overload means all overloads
# without their own entry. An encoder layer in evaluation is as fast as our kernels between matrix
# products. Tokens and `with_effects` keep calls with effects of other libraries in order. Products
# with vectors are calls only for complex numbers.
_TABLE = """
library: addbmm addmv mv dot vdot linear mkldnn_rnn_layer
    convolution convolution_backward _convolution
    _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _transformer_encoder_layer_fwd _native_multi_head_attention
    _linalg_check_errors _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex
    _linalg_svd linalg_cholesky_ex linalg_eig linalg_householder_product linalg_inv_ex
    linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_lu_solve
    linalg_matrix_exp linalg_pinv linalg_qr linalg_solve_triangular cholesky cholesky_inverse
    cholesky_solve geqrf lu_unpack ormqr triangular_solve cudnn_batch_norm cudnn_batch_norm_backward
    miopen_batch_norm_backward multilabel_margin_loss_forward mm.dtype bmm.dtype addmm.dtype
    baddbmm.dtype prims._make_token prims._sink_tokens higher_order.with_effects
library replayed=drawn: _scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention
library replayed=given: _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_cudnn_attention_backward
library type=log_sum: _scaled_dot_product_flash_attention_for_cpu
library strides=fourier: _fft_c2c
library strides=fourier of=1: _fft_r2c _fft_c2r
library into product=0: mm bmm
library into product=1: addmm baddbmm
parts: dist narrow_copy permute_copy split_with_sizes_copy tril_indices triu_indices unbind_copy
    rrelu_with_noise_backward upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_bilinear2d upsample_trilinear3d
view: reshape slice permute squeeze select t transpose unsqueeze diagonal
view strides=view: view _unsafe_view
view strides=view of=1: expand
views: unsafe_split unsafe_split_with_sizes unsafe_chunk
alias: detach alias lift_fresh
copy strides=like: clone _to_copy
across: copy
across memory: copy_
unset: empty empty_strided empty_permuted new_empty new_empty_strided
unset strides=like: empty_like
fill: full zeros scalar_tensor
fill ones: ones
ones: new_ones
ones strides=like: ones_like
ones linear: eye
offset: as_strided
gives: set_
gives offset: set_.source_Tensor_storage_offset
offset memory parts: as_strided_copy
offset memory strides=spread: as_strided_scatter
size: sym_size sym_stride sym_numel sym_storage_offset
compare: eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor
put torn strides=like: index_put _unsafe_index_put
torn: scatter index_copy
torn strides=like: put
places=2: max_pool2d_with_indices adaptive_max_pool2d
places=3: max_pool3d_with_indices adaptive_max_pool3d
choice=1: max.dim min.dim median.dim
choice=1 strides=like twins: sort
choice=2: topk kthvalue
truth: logical_and logical_or logical_xor logical_not any all
norm: linalg_vector_norm norm
linear: neg negative sum trace cumsum scatter_add index_add index_fill
    select_backward slice_backward diagonal_backward col2im
linear strides=like: index_fill.int_Scalar index_fill.int_Tensor
linear strides=here: tril triu diag_embed im2col masked_fill.Scalar
linear strides=told: masked_fill
linear strides=spread: diagonal_scatter
strides=iteration reversed: rsub.Tensor
reversed: threshold_backward leaky_relu_backward
strides=told: conj_physical positive view.dtype floor_divide.Scalar
strides=dense: mse_loss_backward smooth_l1_loss_backward huber_loss_backward glu_backward
    nll_loss2d_forward normal.Tensor_float
strides=here: isin.Tensor_Tensor _log_softmax_backward_data _log_softmax renorm grid_sampler_2d
    mvlgamma
strides=here twins: log_sigmoid_forward
strides=dense type=0: normal.Tensor_Tensor
strides=here type=statistics: native_layer_norm
strides=groups type=statistics: native_group_norm
strides=laid: _native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update
    _batch_norm_no_update
strides=laid type=statistics: native_batch_norm _native_batch_norm_legit.no_stats
    _native_batch_norm_legit_functional _batch_norm_with_update_functional
strides=either of=1: native_batch_norm_backward batch_norm_backward
strides=format: max_unpool2d channel_shuffle reflection_pad2d replication_pad2d reflection_pad3d
    replication_pad3d
strides=format of=1: reflection_pad2d_backward replication_pad2d_backward
    reflection_pad3d_backward replication_pad3d_backward
strides=iteration: floor_divide elu_backward hardswish_backward hardtanh_backward hardswish
    softplus_backward mse_loss smooth_l1_loss native_dropout native_dropout_backward lerp.Scalar
    pow.Tensor_Scalar
strides=like: _prelu_kernel binary_cross_entropy _conj_physical zero zeros_like full_like rand_like
    randn_like randint_like uniform exponential geometric cauchy log_normal normal_functional
    hardtanh rad2deg deg2rad nan_to_num flip fill
strides=like type=0: huber_loss
strides=power: pow.Scalar
strides=power of=1: ldexp.Tensor
strides=index: index.Tensor _unsafe_index
strides=roll: roll
strides=cut: constant_pad_nd
strides=spread: select_scatter slice_scatter
strides=there: pixel_shuffle pixel_unshuffle
type=0: soft_margin_loss
type=1: soft_margin_loss_backward
type=all: addr
"""


def table_rows() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the ops of the table, by their names in it, with their traits and values."""
    for row in _TABLE.replace("\n    ", " ").split("\n"):
        traits, _, names = row.partition(":")
        pairs = (t.partition("=") for t in traits.split())
        facts = {name: value for name, _, value in pairs}
        for name in names.split():
            yield name, facts


_FACTS: Mapping[str, Mapping[str, str]] = dict(table_rows())


@lru_cache(maxsize=4096)
def _facts(op: object) -> Mapping[str, str]:
    """The traits of an op. A training step asks for those of a hundred ops 25,000 times."""
    own = str(op).removeprefix("aten.").removesuffix(".default")
    packet = own.rpartition(".")[0]
    return _FACTS.get(own) or _FACTS.get(packet) or {}


def trait(op: object, name: str) -> str | None:
    """The value of a trait of an op ("" if it has none), None for ops without it.

    `op` is an op of torch, or its name: "aten.mm.default", or "aten.mm" for most overloads.
    """
    return _facts(op).get(name)


def is_random(op: object) -> bool:
    """Say whether an op of torch may draw random numbers, by torch's tag."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def arguments(n: Node) -> Iterator[tuple[Any, Any]]:
    """The formal arguments of an op of torch, each with what a call gives for it."""
    for k, a in enumerate(n.target._schema.arguments):  # type: ignore[union-attr]  # an op
        yield a, n.args[k] if k < len(n.args) else n.kwargs.get(a.name, a.default_value)


def has(op: object, name: str) -> bool:
    """Say whether an op has a trait."""
    return trait(op, name) is not None
