"""A guard about the size of a base that only AOTAutograd reads is lost."""

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd


def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.view(-1)[::3].fill_(1)
    return b @ b.t()


def show(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
    ranges = {str(s): r for s, r in inputs[0].fake_mode.shape_env.var_to_range.items()}
    size = str(inputs[0].shape[1])

    def call(*args: torch.Tensor) -> object:
        print(f"size {args[0].shape[1]} in a graph for {ranges[size]}")
        return gm(*args)

    return make_boxed_func(call)


compiled = torch.compile(f, backend=aot_autograd(fw_compiler=show), dynamic=True)
for n in (5, 3, 5):  # the second graph is for sizes up to 3, and the third call runs it
    base = torch.zeros(1, n)
    compiled(base, base[:, 1:])
