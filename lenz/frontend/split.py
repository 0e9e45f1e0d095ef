"""Cut a joint graph into forward and backward: which values are saved, which computed again."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from lenz.frontend.normalise import dedup

__all__ = ["split"]

AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def split(
    joint: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **rest: Any
) -> tuple[GraphModule, GraphModule]:
    """Return the forward and the backward half of `joint`, by torch's min-cut partitioner.

    Equal calls are merged first: the cut would otherwise save one and compute the other again.
    What activation checkpointing would compute again from a saved state of the generator, dropout
    and attention above all, is saved instead: nothing of that could be fused.
    """
    dedup(joint)
    for n in joint.graph.nodes:
        is_random = torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
        if is_random and n.meta.get("recompute") in AGAIN:
            for made in (n, *(u for u in n.users if u.target is operator.getitem)):
                made.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return min_cut_rematerialization_partition(
        joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **rest
    )
