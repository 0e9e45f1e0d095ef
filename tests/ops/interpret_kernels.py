"""Runs Triton kernels on the CPU, in a process of its own: TRITON_INTERPRET=1 python FILE FOLDER.

For every NAME.py in the folder: kernel NAME over the tensors of NAME.in, whose list as the kernel
leaves it becomes NAME.out.  Triton's interpreter is put right where it differs from a GPU.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

from lenz.ops.reference import fma

_cast = InterpreterBuilder.cast_impl


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    """Rounded once; the interpreter rounds the product too."""
    xs = [torch.from_numpy(np.array(a.data)) for a in (x, y, z)]
    return TensorHandle(fma(*torch.broadcast_tensors(*xs)).numpy(), z.dtype.scalar)


def _exp2(self: Any, x: Any) -> Any:
    """Rounded once; NumPy's own is off by 2.4 units in the last place."""
    return TensorHandle(np.exp2(x.data, dtype=np.float64).astype(x.data.dtype), x.dtype.scalar)


def _least(self: Any, x: Any, y: Any) -> Any:
    """The operand that is not NaN; the interpreter gives NaN."""
    return self.binary_op(x, y, np.fmin)


def _greatest(self: Any, x: Any, y: Any) -> Any:
    return self.binary_op(x, y, np.fmax)


def _cast_bf16(self: Any, x: Any, dtype: Any) -> Any:
    """To nearest even; the interpreter cuts the lower half off, and loses denormals."""
    if (dtype.scalar, x.dtype.scalar) == (tl.bfloat16, tl.float32):
        rounded = torch.from_numpy(np.array(x.data)).bfloat16().view(torch.uint16)
        return TensorHandle(rounded.numpy(), tl.bfloat16)
    if (dtype.scalar, x.dtype.scalar) == (tl.float32, tl.bfloat16):
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
    return _cast(self, x, dtype)


def _round(self: Any, x: Any, dtype: Any, _: Any) -> Any:
    return self.cast_impl(x, dtype)


def _assembly(self: Any, text: str, _: str, values: list[Any], dtype: Any, *__: Any) -> Any:
    """The one instruction that a form is written in."""
    x = values[0].data
    if conversion := re.fullmatch(r"cvt\.rzi\.([su](?:32|64))\.f(?:32|64) \$0, \$1;", text):
        # Beyond the integer's range as on a CPU, which is what the oracle has.
        kind = conversion[1].replace("s", "int").replace("u", "uint")
        found = TensorHandle(x.astype(kind), dtype[0].scalar)
    else:
        assert text == "rcp.approx.ftz.f32 $0, $1;", text
        found = TensorHandle(np.float32(1.0) / x, values[0].dtype.scalar)
    return SimpleNamespace(get_result=lambda _: found)


def _ones(self: Any, dtype: Any) -> Any:
    """All bits set; the interpreter asks NumPy for an unsigned -1."""
    zero = self.get_null_value(dtype)
    return TensorHandle(np.invert(zero.data), zero.dtype)


def _correct() -> None:
    for name, method in (
        ("get_all_ones_value", _ones),
        ("create_exp2", _exp2),
        ("create_fma", _fma), ("create_minnumf", _least), ("create_maxnumf", _greatest),
        ("cast_impl", _cast_bf16), ("create_fp_to_fp", _round), ("create_inline_asm", _assembly),
    ):  # fmt: skip
        assert hasattr(InterpreterBuilder, name), name
        setattr(InterpreterBuilder, name, method)
    # Assertions are kept; integers wrap.
    interpreter_builder.options = replace(
        interpreter_builder.options, debug=True, sanitize_overflow=False
    )


def main(folder: Path) -> None:
    """Run every kernel of the folder."""
    _correct()
    for file in sorted(folder.glob("*.py")):
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        args = torch.load(file.with_suffix(".in"))
        with np.errstate(all="ignore"):
            getattr(module, file.stem)[(1,)](*args)
        torch.save(args, file.with_suffix(".out"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
