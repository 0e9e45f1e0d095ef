"""Machines are found by the type of a device, also outside of lenz, and decide their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
import torch

import lenz.ops  # noqa: F401 - fills the table of ops that the reader looks in
from lenz import machines
from lenz.context import Context
from lenz.errors import InternalError
from lenz.ir.graph import Graph
from lenz.ir.kernel import Launch, TileConfig
from lenz.ir.reader import read
from lenz.machines import Form, machine_of, register
from lenz.opt.split_reduce import split_reduce
from lenz.options import Options
from lenz.schedule import schedule
from lenz.target import Target
from tests.gpu_oracle import kinds_of, on_gpu, scheduled
from tests.lower.harness import lowered

TEXT = """graph @g() on cpu {
  in %x : f32[64, 8]
  out %y = f32[64, 8] : map (i: 64, j: 8) { exp(load(%x, [i, j])) }
}"""


LONG = """graph @g() on cpu {
  in %x : f32[4, 1000000]
  out %y = f32[4] : reduce sum (i: 4 | r: 1000000) { load(%x, [i, r]) }
}"""


def program(text: str = TEXT) -> Graph:
    g = read(text)
    assert isinstance(g, Graph)
    return g


def test_a_machine_outside_of_lenz_is_found_by_its_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    cpu = machine_of("cpu")

    def forms(group: Any, stored: Any, env: Any, cx: Context, space: Any) -> Sequence[Form]:
        asked.extend(n.name for n in group.nests)
        (form,) = cpu.schedule(group, stored, env, cx, space)
        return [replace(form, tile=TileConfig(grain=7))]

    class Found(EntryPoint):
        def load(self) -> None:
            register("npu", replace(cpu, schedule=forms))

    found = EntryPoints((Found("npu", "outside", "lenz.machines"),))
    monkeypatch.setattr(machines, "_HALVES", dict(machines._HALVES))
    monkeypatch.setattr(machines, "_outside", lambda path: found)
    g = program()
    x, y = (replace(b, type=replace(b.type, device="npu:1")) for b in (g.inputs[0], g.nodes[0].out))  # type: ignore[type-var]
    there = replace(g, inputs=(x,), nodes=(replace(g.nodes[0], out=y),))  # type: ignore[arg-type]
    s = schedule(there, Context(Options(), Target("cpu", lanes=8)))
    (step,) = s.steps
    assert isinstance(step, Launch) and step.kernel.tile.grain == 7
    assert len(asked) == 1


def test_a_device_without_a_machine_is_an_error() -> None:
    with pytest.raises(InternalError, match="no machine for xpu:0"):
        machine_of("xpu:0")


def test_a_type_of_devices_has_one_machine() -> None:
    with pytest.raises(InternalError, match="two machines for cpu"):
        register("cpu", replace(machine_of("cpu")))


def test_the_longest_row_in_registers_is_a_number_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A longer row is scanned in parts."""
    cuda = machine_of("cuda")
    scan = on_gpu(lowered(lambda x: x.cumsum(-1), [torch.empty(8, 20_000)]))
    assert kinds_of(scheduled(scan)) == ["scan"]
    short = replace(cuda, capabilities=replace(cuda.capabilities, held=16_384))
    monkeypatch.setitem(machines._HALVES, ("cuda", "machine"), short)
    assert kinds_of(scheduled(scan)) == ["split_scan"]


@pytest.mark.parametrize("like", ["cpu", "cuda"])
def test_passes_ask_a_machine_what_it_can_not_what_its_name_is(
    like: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long sums are split as the machine's capabilities have it."""
    monkeypatch.setattr(machines, "_HALVES", dict(machines._HALVES))
    register("npu", replace(machine_of(like)))
    texts = []
    for device in (like, "npu"):
        g = read(LONG.replace("on cpu", f"on {device}"))
        assert isinstance(g, Graph)
        g = split_reduce(g, Context(Options(), Target("cpu", lanes=8)))
        texts.append(str(g).replace(f"device='{device}'", ""))
    assert texts[0] == texts[1]
