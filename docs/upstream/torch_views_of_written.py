"""A view of a written argument is rebuilt from the strides of the new value."""

import torch


def f(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x.flatten()


compiled = torch.compile(f, backend="aot_eager", dynamic=True)
x = torch.arange(24.0).view(4, 6)[:, ::2]  # strides (6, 2), and those of `x + 1` are (3, 1)
y = compiled(x)
print(torch.equal(y, x.flatten()), y.stride(), x.flatten().stride())  # False (1,) (2,)
