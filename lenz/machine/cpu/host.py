"""The compiler for the host, LLVM: it compiles plans and CPU kernels."""

from __future__ import annotations

from lenz.machine.cpu.llvm.compile import compile_module, features, host_target, link
from lenz.machines import Host, register

register("cpu", Host(host_target, features, compile_module, link))
