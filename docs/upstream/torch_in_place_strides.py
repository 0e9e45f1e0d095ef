"""torch 2.13: after some writes in place, AOTAutograd gives the tensor other strides.

The tensor becomes the result of the functional form of the op. That is contiguous for scatters,
`index_add`, `index_copy`, `masked_fill`, running sums, triangles, `renorm` and matrix products, but
eager keeps the strides. If the write goes through a view, the tensor behind it is turned as well,
and views that eager allows raise. Printed: eager's strides and those of aot_eager, then an error.
"""

import torch


def f(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.masked_fill_(y > 2, 0.0)
    return y


def g(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.t().cumsum_(0)
    return y.view(-1)


x = torch.arange(6.0).reshape(2, 3)
print(f(x.t()).stride(), torch.compile(f, backend="aot_eager")(x.t()).stride())
print(g(x))
print(torch.compile(g, backend="aot_eager")(x))
