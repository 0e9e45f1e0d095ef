"""Every kind of Triton kernel compiles for three generations of GPUs, with registers to spare.

`--all-kernels` prints what the kernels need: registers of a thread, bytes of its stack (what is
spilled), and of the program's shared memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from lenz.context import Context
from lenz.errors import UserError
from lenz.ir.binary import decode
from lenz.ir.kernel import Kernel, KernelKind
from lenz.ir.reader import read
from lenz.machine.cuda.loader import LOADER
from lenz.machine.cuda.triton.compile import compile_text
from lenz.machine.cuda.triton.kernel import emit
from lenz.machines import machine_of
from lenz.options import Options
from lenz.target import Target
from tests.gpu_oracle import kernels_of, kinds_of, on_gpu, scheduled

pytest.importorskip("triton")

ARCHS = (80, 90, 100)
# The kind that is expected, and a graph. Sizes are those of models: tiles are full.
GRAPHS: dict[str, tuple[KernelKind, str]] = {
    "add": ("pointwise", """graph @g() on cpu {
      in %x : bf16[4096, 4096]
      in %y : bf16[4096]
      out %z = bf16[4096, 4096] : map (i: 4096, j: 4096) {
        cast(add(cast(load(%x, [i, j]), f32), cast(load(%y, [j]), f32)), bf16)
      }
    }"""),
    "gelu of a symbolic size": ("pointwise", """graph @g(s0: 1..) on cpu {
      in %x : f32[s0]
      out %z = f32[s0] : map (i: s0) {
        t0 = load(%x, [i])
        mul(mul(t0, 0.5:f32), one_plus_erf(mul(t0, 0.7071067811865476:f32)))
      }
    }"""),
    "dropout": ("pointwise", """graph @g() on cpu {
      in %x : f32[1000000]
      in %s : i64[2]
      out %z = f32[1000000] : map (i: 1000000) {
        t0 = shr(rand_bits(load(%s, [0]), index(i, i64), 0), 8:u32)
        masked(lt(t0, 8388608:u32), load(%x, [i]), 0.0:f32)
      }
    }"""),
    "a long formula of odd rows": ("pointwise", """graph @g() on cpu {
      in %x : f32[16769025]
      in %y : f32[16769025]
      out %z = f32[16769025] : map (i: 16769025) { atan2(load(%x, [i]), load(%y, [i])) }
    }"""),
    "functions of doubles": ("pointwise", """graph @g() on cpu {
      in %x : f64[100000]
      out %z = f64[100000] : map (i: 100000) { add(exp(load(%x, [i])), tanh(load(%x, [i]))) }
    }"""),
    "checked gather": ("pointwise", """graph @g() on cpu {
      in %x : f32[1000, 64]
      in %i : i64[5000]
      out %z = f32[5000, 64] : map (i: 5000, j: 64) {
        load(%x, [@0, j]; @0: 0..999 = assert_in_range(load(%i, [i]), index(1000, i64)))
      }
    }"""),
    "cat": ("pointwise", """graph @g() on cpu {
      in %x : f32[64, 100]
      in %y : f32[64, 300]
      out %z = f32[64, 400] : map (i: 64, j: 400) {
        masked(lt(index(j, i64), 100:i64), load(%x, [i, j]), load(%y, [i, j % 300]))
      }
    }"""),
    "transpose": ("transpose", """graph @g() on cpu {
      in %x : f16[2048, 1000]
      in %y : f16[1000, 2048]
      out %z = f16[1000, 2048] : map (i: 1000, j: 2048) {
        cast(add(cast(load(%x, [j, i]), f32), cast(load(%y, [i, j]), f32)), f16)
      }
    }"""),
    "softmax": ("reduction", """graph @g() on cpu {
      in %x : f32[512, 4096]
      %m = f32[512] : reduce max (i: 512 | r: 4096) { load(%x, [i, r]) }
      %d = f32[512] : reduce sum (i: 512 | r: 4096) { exp(sub(load(%x, [i, r]), load(%m, [i]))) }
      out %y = f32[512, 4096] : map (i: 512, j: 4096) {
        div(exp(sub(load(%x, [i, j]), load(%m, [i]))), load(%d, [i]))
      }
    }"""),
    "longest row that is held": ("reduction", """graph @g() on cpu {
      in %x : bf16[512, 32768]
      %s = f32[512] : reduce sum (i: 512 | r: 32768) { cast(load(%x, [i, r]), f32) }
      out %y = bf16[512, 32768] : map (i: 512, j: 32768) {
        cast(sub(cast(load(%x, [i, j]), f32), load(%s, [i])), bf16)
      }
    }"""),
    "positions in a long row": ("reduction", """graph @g() on cpu {
      in %x : f32[512, 100000]
      out %y = i64[512] : reduce argmax (i: 512 | r: 100000) { load(%x, [i, r]) }
    }"""),
    "short rows of bytes": ("reduction", """graph @g() on cpu {
      in %x : u8[100000, 20]
      out %y = u8[100000] : reduce max (i: 100000 | r: 20) { load(%x, [i, r]) }
    }"""),
    "columns": ("outer_reduction", """graph @g() on cpu {
      in %x : f32[100000, 512]
      out %y = f32[512] : reduce sum (i: 512 | r: 100000) { load(%x, [r, i]) }
    }"""),
    "symbolic columns": ("outer_reduction", """graph @g(s0: 1.., s1: 1..) on cpu {
      hint (s0: 1000, s1: 4096)
      in %x : f64[s0, s1]
      out %y = f64[s1] : reduce min (i: s1 | r: s0) { load(%x, [r, i]) }
    }"""),
    "running sums": ("scan", """graph @g() on cpu {
      in %x : f32[512, 4000]
      out %y = f32[512, 4000] : scan sum (i: 512, j: 4000) over j { load(%x, [i, j]) }
    }"""),
    "running sums in parts": ("split_scan", """graph @g(s0: 1.., s1: 1..) on cpu {
      hint (s0: 1000, s1: 1000000)
      in %x : f64[s0, s1]
      out %y = f64[s0, s1] : scan sum (i: s0, j: s1) over j { load(%x, [i, j]) }
    }"""),
    "updates": ("scatter", """graph @g() on cpu {
      in %x : f32[1000, 64]
      in %i : i64[5000]
      in %u : f32[5000, 64]
      out %y = f32[1000, 64] : scatter add (i: 5000, j: 64) (%x, [@0, j]; @0: 0..999 =
        assert_in_range(load(%i, [i]), index(1000, i64))) { load(%u, [i, j]) }
    }"""),
    "sorted rows": ("sort", """graph @g() on cpu {
      in %x : i32[500, 300]
      out %y = i32[500, 300] : sort (i: 500, j: 300) over j { load(%x, [i, j]) }
    }"""),
    "in place, with a barrier": ("pointwise", """graph @g() on cpu {
      in %x : f32[5000]
      %y = f32[5000] : map (i: 5000) {
        t0 = load(%x, [i])
        masked(lt(index(i, i64), 10:i64), add(t0, 1.0:f32), add(load(%x, [i]), t0))
      }
      mutate %x <- %y
    }"""),
}  # fmt: skip


def kernels(name: str) -> list[Kernel]:
    """The kernels of a graph; the one that the graph is there for comes first."""
    kind, text = GRAPHS[name]
    s = scheduled(on_gpu(read(text)))  # type: ignore[arg-type]
    assert kind in kinds_of(s)
    return sorted(kernels_of(s), key=lambda k: k.kind != kind)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", GRAPHS)
def test_kernels_compile(name: str, all_kernels: bool, capsys: pytest.CaptureFixture[str]) -> None:
    found = kernels(name)
    for k in found if all_kernels else found[:1]:
        for arch in ARCHS:
            b = compile_text(emit(k, arch), arch)
            assert b.code[:4] == b"\x7fELF" and b.warps == k.tile.warps
            if k.kind in ("pointwise", "transpose"):
                assert b.spills == 0, f"{k.name} spills {b.spills} bytes on sm_{arch}"
            assert b.registers * b.warps * 32 <= 65536, "more registers than a multiprocessor has"
            if all_kernels:
                with capsys.disabled():
                    print(f"\nsm_{arch:<4}{k.kind:16}{k.name:40}{k.tile.warps:3} warps "
                          f"{b.registers:4} registers {b.spills:4} stack {b.shared:6} shared",
                          end="")  # fmt: skip


def test_kernels_compile_for_gpus_that_are_elsewhere(tmp_path: Path) -> None:
    """The code that artifacts hold for other compute capabilities is for their architecture."""
    cx, mine = Context(Options(cache_dir=str(tmp_path)), Target("cpu")), kernels("add")
    for capability in ("8.0", "9.0"):
        fits, pieces = machine_of("cuda:0").elsewhere(mine, capability, cx)
        assert fits == f"compute capability {capability}" and [*pieces] == [k.name for k in mine]
        for _, code in pieces.values():
            # In the flags of an ELF file the architecture is bits 0 to 7, or 8 to 15.
            flags = int.from_bytes(decode(code).code[48:52], "little")
            assert int(capability.replace(".", "")) in (flags & 255, flags >> 8 & 255)
    for wrong in ("7.5", "80", "8.", "9.0a", "x.y"):
        with pytest.raises(UserError, match="there is no code for compute capability"):
            machine_of("cuda:0").elsewhere(mine, wrong, cx)
    with pytest.raises(UserError, match=r"not compiled for '8\.0'"):
        machine_of("cpu").elsewhere(mine, "8.0", cx)


@pytest.mark.parametrize(
    ("made", "here", "runs"),
    [("8.0", "8.0", True), ("8.0", "8.9", True), ("8.6", "8.0", False), ("8.0", "9.0", False),
     ("9.0", "8.9", False), ("10.0", "1.0", False), ("9.0", "9.0", True), ("10.0", "10.0", True),
     ("10.0", "10.3", False), ("12.0", "12.1", False)],
)  # fmt: skip
def test_a_cubin_runs_on_later_gpus_of_its_major_number_before_9(
    made: str, here: str, runs: bool
) -> None:
    told = [f"compute capability {x}" for x in (made, here)]
    assert LOADER.runs(*told) is runs


def test_every_kind_is_compiled() -> None:
    # Combos are kernels of these kinds: tests/schedule/test_beside.py.
    assert {kind for kind, _ in GRAPHS.values()} == {*get_args(KernelKind)} - {"combo"}
