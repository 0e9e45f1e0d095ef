"""Triton text -> cubin, in this process. Only this file imports Triton.

It needs no GPU, no driver, no C compiler and no torch. `triton.compile` is not used, because it
reads all of Triton's files for its cache key and stores every stage on disk. Instead the stages of
its backend are called one by one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import linecache
import os
import re
import struct
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

from lenz.errors import InternalError, Missing
from lenz.ir.binary import Binary, sections
from lenz.records import dataclass

LIBDEVICE = re.compile(r"\b(libdevice\.|tl\.(floor|ceil)\()")
ENTRY = re.compile(r"\.entry\s+\w+\s*\(([^)]*)\)")
# Flags of vector operations on integers are only guaranteed for lanes that are read. LLVM packs two
# lanes into one register, where an unread lane that violates its flags spills into its neighbour
# (docs/upstream/triton-36-packed-shift.ll).
FLAGS = re.compile(r"(= \w+) (?:(?:nuw|nsw|exact|disjoint|nneg) )+(?=<\d+ x i\d+>)")
# Where one half alone of a packed sum with a constant is read, ptxas adds 0 to it
# (docs/upstream/ptxas-12-packed-add.ptx).
PACKED_SUM = re.compile(r"add\.[su]16x2\s+([^,;]+), ([^,;]+), ([^;]+);")
SUMS = (
    r"{ .reg .b16 a<4>; mov.b32 {a0, a1}, \2; mov.b32 {a2, a3}, \3; "
    r"add.s16 a0, a0, a2; add.s16 a1, a1, a3; mov.b32 \1, {a0, a1}; }"
)

# Attributes of a cubin (type 0x70000000): format, number, and a length or a short value.
CUDA_INFO, ATTRIBUTE, WITH_LENGTH = 0x70000000, struct.Struct("<BBH"), 4
REGISTERS, FRAME_SIZE = 0x2F, 0x11


@dataclass(frozen=True, slots=True)
class KernelText:
    """One kernel as text: a Python module that defines `@triton.jit def name(...)`.

    `signature` has Triton's type of each parameter ("*fp32", "*i8", "i64", "fp32"), none of them a
    constexpr. `aligned` are the positions of parameters that are multiples of 16 (pointers: in
    bytes). `warps` is a power of two, `stages` the depth of pipelined loops. `checks` keeps
    `tl.device_assert`. `registers` is the maximum per thread, or 0.
    """

    name: str
    text: str
    signature: tuple[str, ...]
    aligned: tuple[int, ...]
    warps: int
    stages: int
    checks: bool
    registers: int = 0

    def line(self) -> str:
        """The kernel as JSON: the request to a worker and the key of the cache."""
        return json.dumps(astuple(self))

    @classmethod
    def read(cls, line: str) -> KernelText:
        """The inverse of `line`."""
        name, text, signature, aligned, *rest = json.loads(line)
        return cls(name, text, tuple(signature), tuple(aligned), *rest)


@cache
def version() -> str:
    """Identify the installed Triton and this file, for cache keys, without importing Triton.

    The sizes of its library and assemblers distinguish builds of one version. Raises Missing if
    there is no Triton.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise Missing("Triton is not installed", hint="pip install 'lenz[gpu]'")
    package = Path(spec.origin).parent
    found = re.search(r"__version__ = '([^']*)'", Path(spec.origin).read_text(encoding="utf-8"))
    assemblers = sorted((package / "backends/nvidia/bin").glob("ptx*"))
    files = (package / "_C" / "libtriton.so", *assemblers)
    sizes = [f"{f.name} {os.stat(f).st_size}" for f in files if f.exists()]
    own = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    return " ".join(["triton", found[1] if found else "?", *sizes, own])


def compile_text(k: KernelText, arch: int) -> Binary:
    """Compile one kernel for compute capability `arch` (90 is sm_90).

    Raises InternalError with the kernel's name and Triton's message, also if it cannot be imported.
    """
    try:
        from triton import knobs

        # Line tables take 10 of 18 KiB of a cubin and a quarter of the time.
        with knobs.compilation.scope():
            knobs.compilation.disable_line_info = True
            return _compile(k, arch)
    except InternalError:
        raise
    except Exception as e:  # Triton has no error class: also assertions and RuntimeErrors
        message = f"kernel {k.name}: Triton does not compile it: {type(e).__name__}: {e}"
        raise InternalError(message, pass_name="codegen") from e


def _compile(k: KernelText, arch: int) -> Binary:
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend

    function = _function(k)
    if len(function.arg_names) != len(k.signature):
        raise InternalError(f"kernel {k.name}: {len(k.signature)} types", line=k.text)
    types = dict(zip(function.arg_names, k.signature, strict=True))
    source = ASTSource(function, types, {}, {(n,): [["tt.divisibility", 16]] for n in k.aligned})
    backend = make_backend(GPUTarget("cuda", arch, 32))
    # Settings that Triton would take from the environment are passed explicitly, so that the key is
    # complete. `sanitize_overflow` would check every integer sum if checks are on; ours wrap. Fused
    # multiply-adds would skip roundings to halves that the program asks for (LLVM then computes
    # both in bf16). Denormals that libdevice flushes to zero make fmod NaN. Without libdevice they
    # cost three instructions per 2^x, whose small results are zero anyway. Triton also calls
    # libdevice for floor and ceil.
    given = {
        "arch": f"sm{arch}",
        "ptx_options": "",
        "enable_fp_fusion": False,
        "enable_reflect_ftz": LIBDEVICE.search(k.text) is None,
        "num_warps": k.warps,
        "num_stages": k.stages,
        "maxnreg": k.registers or None,
        "debug": k.checks,
        "sanitize_overflow": False,
    }
    options = backend.parse_options(given)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    functions = backend.get_codegen_implementation(options)
    made = source.make_ir(backend.target, options, functions, backend.get_module_map(), context)
    facts: dict[str, Any] = {}
    entry = None
    for stage, run in stages.items():
        made = run(made, facts)
        if stage == "llir":
            made = FLAGS.sub(r"\1 ", made)
        if stage == "ptx":
            made = PACKED_SUM.sub(SUMS, made)
            entry = ENTRY.search(made)
    if entry is None or facts["global_scratch_size"] or facts["profile_scratch_size"]:
        raise InternalError(f"kernel {k.name} needs global scratch memory, or has no entry")
    extra = entry[1].count(".param") - len(k.signature)
    warps = facts.get("num_warps", k.warps)
    return Binary(facts["name"], made, warps, facts["shared"], extra, *_resources(made))


def _function(k: KernelText) -> Any:
    """Run the text and return its kernel; Triton reads the source again through `inspect`."""
    # In angle brackets; otherwise `inspect` looks for a file.
    file = f"<triton {k.name} {hashlib.sha256(k.text.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(k.text), None, k.text.splitlines(keepends=True), file)
    try:
        module: dict[str, Any] = {"__name__": "lenz.kernels"}
        exec(compile(k.text, file, "exec"), module)
        return module[k.name]
    finally:
        del linecache.cache[file]


def _resources(code: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread, from a cubin's attributes; -1 if missing."""
    found = {REGISTERS: -1, FRAME_SIZE: -1}
    for kind, at, length, _ in sections(code):
        end = at + length if kind == CUDA_INFO else 0
        while at < end:
            form, attribute, value = ATTRIBUTE.unpack_from(code, at)
            at += ATTRIBUTE.size
            if form == WITH_LENGTH:
                if attribute in found:  # the number of a symbol, then the value
                    (number,) = struct.unpack_from("<4xI", code, at)
                    found[attribute] = max(found[attribute], number)
                at += value
    return found[REGISTERS], found[FRAME_SIZE]
