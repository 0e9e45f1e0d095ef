"""A guard on a size of a base that AOTAutograd has traced anew has no source, and Dynamo raises."""

import torch
from functorch.compile import make_boxed_func
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd


def f(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    few = torch.tensor([1, 3])
    if a.shape[0] > 2:
        return torch.isin(a, few), b + 1
    return torch.isin(a + a.transpose(0, 1), few), b + 1


backend = aot_autograd(
    fw_compiler=lambda gm, _: make_boxed_func(gm.forward),
    decompositions=get_decompositions([torch.ops.aten.isin]),
)
compiled = torch.compile(f, backend=backend, dynamic=True)
with torch.no_grad():
    for n, m in ((5, 9), (2, 7)):  # the strides of the view are symbols in the second graph
        a = torch.zeros(n, n, m, dtype=torch.int64)
        compiled(a, a[..., 1:])  # AssertionError: sources must not be empty for symbol
