"""Which aten ops AOTAutograd takes apart before lenz sees the graph.

Every node that a decomposition adds is traced again with fake tensors, in every stage of
AOTAutograd, while `lower/` takes a composite op in microseconds.  So an op that `lower/` knows
stays whole, an op whose library form beats any fusion stays whole, and the rest is decomposed
into pointwise ops and reductions, which fuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch._decomp import _core_aten_decompositions_post_autograd, decomposition_table

from lenz.frontend.cells import CELLS
from lenz.frontend.refusals import kept_whole
from lenz.frontend.strides import laid_as_in_eager, rule_of

# Overload packets that are never decomposed, although torch has a decomposition, and the reason.
LIBRARY = "the library call beats what fusion can do with the parts"
RANDOM = "the parts would draw other random numbers than eager does"
SCATTER = "the parts are an accumulating index_put, slower than the op itself"
VIEW = "a view: it costs nothing as it is"
KEEP_WHOLE: Mapping[str, str] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": LIBRARY,
    "aten._embedding_bag": LIBRARY,
    "aten.baddbmm": LIBRARY,
    "aten.cudnn_batch_norm": LIBRARY,
    "aten.cudnn_batch_norm_backward": LIBRARY,
    "aten.miopen_batch_norm_backward": LIBRARY,
    "aten._fused_moving_avg_obs_fq_helper": LIBRARY,
    "aten.avg_pool2d_backward": LIBRARY,
    "aten.multilabel_margin_loss_forward": LIBRARY,
    "aten.upsample_trilinear3d": LIBRARY,
    "aten.bernoulli": RANDOM,
    "aten.rrelu_with_noise": RANDOM,
    "aten.rrelu_with_noise_functional": RANDOM,
    "aten.embedding_dense_backward": SCATTER,
    "aten.index_add": SCATTER,
    "aten.index_copy": SCATTER,
    "aten.index_fill": SCATTER,
    "aten.upsample_nearest2d_backward": SCATTER,
    "aten.t": VIEW,
    "aten.transpose": VIEW,
    "aten.unbind": VIEW,
    "aten.narrow": VIEW,
    "aten.split": VIEW,
    "aten.squeeze": VIEW,
    "aten.expand_as": VIEW,
    "aten._unsafe_view": VIEW,
    "aten._reshape_alias": VIEW,
}
# Packets whose decomposition the core table leaves out, and which is as good as a lowering.
ALSO = (
    "aten.narrow_copy", "aten.permute_copy", "aten.tril_indices", "aten.triu_indices",
    "aten.unbind_copy", "aten.view_copy", "aten.rrelu_with_noise_backward",
)  # fmt: skip


@lru_cache(maxsize=4)
def decompositions(native: frozenset[str]) -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Return the decomposition table for AOTAutograd.

    `native` holds the ops that `lower/` takes natively, as "aten.gelu.default" (one overload) or
    "aten.gelu" (all overloads).  Every other op with a decomposition in torch's core table,
    or named by `ALSO`, is taken apart, but for those of `KEEP_WHOLE`; and so are `CELLS`.
    The table is shared: do not write into it.
    """
    table: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
    core = _core_aten_decompositions_post_autograd()
    for op, rule in decomposition_table.items():
        if not isinstance(op, torch._ops.OpOverload):
            continue
        name = str(op)  # "aten.gelu.default"
        packet = name.rsplit(".", 1)[0]
        if op not in core and packet not in ALSO:
            continue
        if name in native or packet in native or packet in KEEP_WHOLE:
            continue
        rule = rule if rule_of(op) is None else laid_as_in_eager(op, rule)
        table[op] = kept_whole(packet, rule)
    return {**table, **CELLS}
