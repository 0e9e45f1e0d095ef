"""LLVM IR text -> object code -> addresses, in the process. The only place that imports llvmlite.

Objects hold symbol names and no addresses, so they can be stored on disk and linked in any process
on the same target. Codegen level 0 aborts the process on AVX512 masks: kernels never use it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from lenz.errors import InternalError
from lenz.target import Target


@cache
def _binding() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


@cache
def host_target() -> Target:
    """This process's CPU as a target."""
    import llvmlite

    llvm = _binding()
    found = llvm.get_host_cpu_features()
    features = ",".join(("+" if found[k] else "-") + k for k in sorted(found))
    version = ".".join(str(n) for n in llvm.llvm_version_info)
    triple = llvm.get_process_triple()
    lanes = 16 if found.get("avx512f") else 8 if found.get("avx2") else 4
    compiler = f"llvm {version} llvmlite {llvmlite.__version__}"
    return Target("cpu", triple, llvm.get_host_cpu_name(), features, lanes, compiler)


def features() -> frozenset[str]:
    """What this process's CPU can do, by LLVM's names."""
    return frozenset(name for name, has in _binding().get_host_cpu_features().items() if has)


@cache
def _machine(target: Target, level: int = 2) -> Any:
    llvm = _binding()
    if not target.triple.startswith(llvm.get_process_triple().split("-")[0]):
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    how: dict[str, Any] = {"reloc": "pic", "codemodel": "small", "jit": True, "opt": level}
    made = llvm.Target.from_triple(target.triple)
    return made.create_target_machine(cpu=target.cpu, features=target.features, **how)


def compile_module(text: str, target: Target | None = None, level: int = 2) -> bytes:
    """Compile one module to an object file; raises InternalError for text that LLVM rejects."""
    llvm = _binding()
    try:
        # The module must be freed before its context, even if an error's traceback keeps both.
        with llvm.parse_assembly(text, llvm.create_context()) as module:
            # The parser does not check that definitions precede uses; LLVM would then abort the
            # process. This check takes 1% of the compile time.
            module.verify()
            return bytes(_machine(target or host_target(), level).emit_object(module))
    except RuntimeError as e:
        raise InternalError(f"LLVM does not accept the text: {e}", pass_name="codegen") from e


def assembly(text: str, target: Target | None = None) -> str:
    """The assembly text of one module, for people."""
    module = _binding().parse_assembly(text, _binding().create_context())
    return str(_machine(target or host_target()).emit_assembly(module))


class Linked:
    """Linked code. The addresses are valid as long as this object lives."""

    def __init__(self, tracker: Any, addresses: dict[str, int]) -> None:
        self._tracker = tracker
        self.addresses = addresses


@cache
def _linker() -> tuple[Any, Any]:
    # Library names must be unique within a process, hence the count.
    jit = _binding().create_lljit_compiler(use_jit_link=True, suppress_errors=True)
    return jit, itertools.count()


def link(obj: bytes, exports: Sequence[str], imports: Mapping[str, int]) -> Linked:
    """Link an object and give the addresses of `exports`.

    `imports` are addresses of the functions that the object calls; raises InternalError if one is
    missing. Keep the result alive as long as the code may run.
    """
    builder = _binding().JITLibraryBuilder().add_object_img(obj)
    for symbol in sorted(imports):
        builder.import_symbol(symbol, imports[symbol])
    for symbol in exports:
        builder.export_symbol(symbol)
    jit, count = _linker()
    try:
        tracker = builder.link(jit, f"lenz.{next(count)}")
    except RuntimeError as e:
        raise InternalError(f"the object does not link: {e}", pass_name="codegen") from e
    return Linked(tracker, {symbol: tracker[symbol] for symbol in exports})
