"""NVIDIA GPUs as a machine for the compiler: programs of a grid, Triton text, cubins."""

from __future__ import annotations

from lenz.machine.cuda.schedule import CAPABILITIES, forms, loss
from lenz.machines import Machine, register

register("cuda", Machine(CAPABILITIES, forms, loss))
