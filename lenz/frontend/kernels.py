"""The user's own Triton kernels, as attributes of the graph that calls them.

A call refers to its kernel, and to arguments that no graph can hold, by numbers in a table of the
process. `torch._dynamo.reset` empties that table, so both are read from it at once.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from torch._ops import HigherOrderOperator
from torch.fx import GraphModule

CALL = "triton_kernel_wrapper_functional"


def bind_kernels(gm: GraphModule) -> None:
    """Give each call of a user's kernel its own attribute: the kernel and those arguments.

    The node that reads the attribute becomes `meta["user_kernel"]` of the call.
    """
    for n in gm.graph.nodes:
        if not isinstance(n.target, HigherOrderOperator) or n.target.__name__ != CALL:
            continue
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

        asked: Any = n.kwargs
        kernel: Any = kernel_side_table.get_kernel(asked["kernel_idx"])
        constants = kernel_side_table.get_constant_args(asked["constant_args_idx"])
        inner = kernel
        while not hasattr(inner, "__name__"):  # an autotuner around the function
            inner = inner.fn
        name = next(x for k in count() if not hasattr(gm, x := f"{inner.__name__}_{k}"))
        setattr(gm, name, (kernel, dict(constants)))
        with gm.graph.inserting_before(n):
            n.meta["user_kernel"] = gm.graph.create_node("get_attr", name)
