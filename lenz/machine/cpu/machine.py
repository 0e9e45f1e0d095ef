"""CPUs as a machine for the compiler: loops and vectors, LLVM text, code in the process."""

from __future__ import annotations

from lenz.machine.cpu.schedule import forms, loss
from lenz.machines import Machine, register
from lenz.target import Capabilities

register("cpu", Machine(Capabilities(), forms, loss))
