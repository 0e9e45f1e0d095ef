"""The tensors around launches and calls: printed, saved, or searched for the first NaN."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Sequence

import torch

from lenz.debug.between import taken_and_made, title_of
from lenz.debug.names import titled
from lenz.debug.trace import file_name, new_folder, write_in
from lenz.debug.watch import Tensors, Watch, Watched
from lenz.ir.plan import LaunchStep
from lenz.options import Options

FIRST = 8  # printed values


def _lines(t: torch.Tensor) -> str:
    """A tensor in three lines."""
    numbers = t.detach().resolve_neg().reshape(-1)
    if t.dtype is torch.bool or (t.is_floating_point() and t.itemsize == 1):
        numbers = numbers.float()  # torch has no extrema of these
    nans, infs = (int(f(numbers).sum()) for f in (torch.isnan, torch.isinf))
    ends = "none"
    if t.numel() and not numbers.is_complex():
        ends = "{} {}".format(*(x.item() for x in torch.aminmax(numbers)))
    lay = f"size {list(t.shape)}, stride {list(t.stride())}, dtype {t.dtype}, device {t.device}"
    rest = f"layout {t.layout}, numel {t.numel()}, contiguous {t.is_contiguous()}"
    more = "" if t.numel() <= FIRST else ", ..."
    return (
        f"  {lay}, {rest}, requires_grad {t.requires_grad}\n"
        f"  min and max {ends}, nan {nans}, inf {infs}\n"
        f"  values {str(numbers[:FIRST].tolist())[:-1]}{more}]"
    )


class Shown(Watch):
    """Prints the tensors around each launch and call, or saves them, one file each.

    With the option `debug_kernels`, only those of the named kernels and ops.
    """

    def __init__(self, graph: Watched, options: Options) -> None:
        super().__init__(graph)
        wanted = (options.debug_kernels or "").split(",")
        self.names = {name.strip() for name in wanted if name.strip()}
        there = dict.fromkeys(filter(None, map(title_of, self.steps)))
        if self.names and not self.names & there.keys():
            missing, title = ", ".join(sorted(self.names)), titled(graph.name)
            has = ", ".join(there) or "none"
            message = f"lenz: {title} has no kernel or call {missing}; it has {has}"
            warnings.warn(message, stacklevel=2)
        self.folder = None
        if options.debug_values == "save":
            self.folder = new_folder(str(options.debug_dir), f"{graph.name}.values")
            print(f"lenz: values of {titled(graph.name)} in {self.folder}", file=sys.stderr)
        self.calls = 0

    def begin(self, args: Tensors) -> None:
        self.calls += 1

    def before(self, k: int, tensors: Tensors, sizes: Sequence[int] = ()) -> None:
        self.show("before_launch", k, tensors)

    def after(self, k: int, tensors: Tensors) -> None:
        self.show("after_launch", k, tensors)

    def show(self, when: str, k: int, tensors: Tensors) -> None:
        """Print or save the tensors of a step."""
        name = title_of(self.steps[k])
        if self.names and name not in self.names:
            return
        # Results come after the step; an in-place kernel has a buffer twice.
        for buffer, t in dict(zip(names_of(self.graph, k), tensors, strict=False)).items():
            if not isinstance(t, torch.Tensor):
                continue
            if self.folder is None:
                print(f"[ {when} - {name} - {buffer} ]\n{_lines(t)}", file=sys.stderr)
            else:
                data = io.BytesIO()
                torch.save(t.detach().clone(), data)
                file = file_name(f"{self.calls}.{k}.{when}.{name}.{buffer}") + ".pt"
                write_in(self.folder, {file: data.getvalue()})


def names_of(graph: Watched, k: int) -> list[str]:
    """The names of a step's operands and results, the user's if there are any."""
    taken, made = taken_and_made(graph.plan.flat[k])
    return [graph.labels.get(name, name) for name in (*taken, *made)]


class Nans(Watch):
    """Stops at the first launch or call that makes a NaN although none of its operands has one.

    New memory is zeroed, since uninitialised memory may hold NaN.
    """

    def made(self, k: int, t: torch.Tensor) -> None:
        t.zero_()

    def before(self, k: int, tensors: Tensors, sizes: Sequence[int] = ()) -> None:
        counts = [_nans(t) for t in tensors]
        step = self.steps[k]
        modes = [""] * len(counts)
        if isinstance(step, LaunchStep):
            modes = [p.mode for p in self.graph.kernels[step.kernel].params]
        self.given = sum(n for n, mode in zip(counts, modes, strict=True) if mode != "out")
        self.counts = counts

    def after(self, k: int, tensors: Tensors) -> None:
        name = title_of(self.steps[k])
        if self.given or ".empty" in name or ".new_empty" in name:
            return
        olds = [*self.counts, *[0] * (len(tensors) - len(self.counts))]
        for buffer, t, old in zip(names_of(self.graph, k), tensors, olds, strict=True):
            if (new := _nans(t)) > old:
                at = f", at {line}" if (line := self.graph.lines.get(k, "")) else ""
                what = f"{name} of {titled(self.graph.name)} makes {new - old} NaN in {buffer}"
                raise FloatingPointError(f"{what} of size {list(t.shape)} from numbers{at}")


def _nans(t: object) -> int:
    if not isinstance(t, torch.Tensor) or not (t.is_floating_point() or t.is_complex()):
        return 0
    return int(torch.isnan(t.float() if t.itemsize == 1 else t).sum())
