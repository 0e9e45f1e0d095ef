"""Cut a joint graph into forward and backward: which values are saved, which computed again."""

from __future__ import annotations

from typing import Any

from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from lenz.frontend.normalise import dedup

__all__ = ["split"]


def split(
    joint: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **rest: Any
) -> tuple[GraphModule, GraphModule]:
    """Return the forward and the backward half of `joint`, by torch's min-cut partitioner.

    Equal calls are merged first: the cut would otherwise save one and compute the other again.
    """
    dedup(joint)
    return min_cut_rematerialization_partition(
        joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **rest
    )
