"""A product of three sizes is one call of `operator.mul` with three arguments."""

import operator

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd


def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.add_(1)
    return a + 0


def show(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
    for n in gm.graph.find_nodes(op="call_function", target=operator.mul):
        print(n.format_node())
    print(*(line.strip() for line in gm.code.splitlines() if "mul_1 =" in line))
    return make_boxed_func(gm.forward)


base = torch.arange(120.0).reshape(2, 3, 4, 5)
backend = aot_autograd(fw_compiler=show)
compiled = torch.compile(f, backend=backend, dynamic=True)
print(torch.equal(compiled(base.transpose(0, 3), base.permute(3, 1, 2, 0)), base.transpose(0, 3)))
