"""The machine that code is compiled for, as data."""

from __future__ import annotations

from dataclasses import dataclass

HOST = "cpu"  # the device that plans run on


@dataclass(frozen=True, slots=True)
class Target:
    """A target of code generation.

    kind      "cpu" or "cuda"
    triple    LLVM target triple, or the name of the CUDA architecture
    cpu       LLVM's name of the processor
    features  LLVM feature string, "+avx2,-avx512f,..."
    lanes     elements of one vector in CPU kernels, of whatever type
    version   version of the compiler behind the target; part of every cache key
    """

    kind: str
    triple: str = ""
    cpu: str = ""
    features: str = ""
    lanes: int = 1
    version: str = ""

    def has(self, feature: str) -> bool:
        """True when the processor has the feature, e.g. "avx512f"."""
        return f"+{feature}," in self.features + ","

    def key(self) -> str:
        """The target's text in a cache key."""
        return f"{self.kind} {self.triple} {self.cpu} {self.features} {self.lanes} {self.version}"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a machine can do, as the numbers that decisions depend on.

    buffers   pointers of one kernel, beyond which a larger one runs out of registers or streams
    relies    kernels rely on what their plan checks: aligned pointers, and upper bounds on sizes
    units     multiprocessors, each of which runs several programs; 0 if there are no programs
    held      the longest row that a program holds in registers, in elements; 0 if it holds none
    summed    the same if it also sums columns, which takes registers
    launch    elements that are read in the time that a launch takes; 0 if it takes none
    cache     bytes that are still there when several programs read their rows again
    raises    a failed check ends the call before the next launch
    """

    buffers: int
    relies: bool = False
    units: int = 0
    held: int = 0
    summed: int = 0
    launch: int = 0
    cache: int = 0
    raises: bool = False
