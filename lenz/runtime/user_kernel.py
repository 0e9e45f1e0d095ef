"""Launch the user's Triton kernels through Triton itself, as eager does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch

Grid = Sequence[int]


def user_kernel(
    bound: tuple[Any, dict[str, Any]],
    grids: Sequence[Grid],
    names: Sequence[str],
    values: Sequence[Any],
    writes: Sequence[int],
    descriptors: Sequence[tuple[str, list[int]]],
) -> tuple[Any, ...]:
    """Launch on the current stream of the arguments' device; returns the `values` it writes.

    `bound` is the kernel (a `triton.jit` function or an autotuner around one) with the arguments
    that are not part of the graph. `grids` has one grid per configuration of the autotuner.
    `writes` are positions in `values`. `descriptors` maps the tensors that the kernel takes as
    block descriptors to the shapes of their blocks.
    """
    kernel, constants = bound
    given = {**constants, **dict(zip(names, values, strict=True))}
    for name, block in descriptors:
        from triton.tools.tensor_descriptor import TensorDescriptor

        given[name] = TensorDescriptor.from_tensor(given[name], block)
    # Positional where possible: Triton's hooks do not see keywords (triton issue 5082).
    args = [given.pop(name) for name in takewhile(given.__contains__, kernel.arg_names)]
    launch = kernel[_grid(kernel, grids)]
    place = next((v.device for v in values if isinstance(v, torch.Tensor) and v.is_cuda), None)
    if place is None or place.index == torch.cuda.current_device():
        launch(*args, **given)
    else:
        with torch.cuda.device(place):
            launch(*args, **given)
    return tuple([values[k] for k in writes])


def _grid(kernel: Any, grids: Sequence[Grid]) -> Any:
    """The grid; of several, the one for the configuration that the autotuner chose."""
    if len(grids) == 1:
        return tuple(grids[0])

    def chosen(meta: dict[str, Any]) -> Grid:
        for config, grid in zip(kernel.configs, grids, strict=True):
            if all(meta.get(k) == v for k, v in config.kwargs.items()):
                return tuple(grid)
        raise ValueError(f"no configuration of {kernel} fits {meta}")

    return chosen
