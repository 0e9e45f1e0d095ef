"""The machine that code is compiled for, as data."""

from __future__ import annotations

from dataclasses import dataclass

from lenz.errors import InternalError

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

    buffers    pointers of one kernel, beyond which a larger one runs out of registers or streams
    relies     kernels rely on what their plan checks: aligned pointers, and upper bounds on sizes
    raises     a failed check ends the call before the next launch
    paged      memory is mapped page by page where it is first touched
    bandwidth  bytes per second that a copy reads and writes
    adds       additions of f32 per second
    cached     speed of the second-level cache relative to memory
    products   operations per second in matrix products of halves, by units made for them (tensor
               cores), which take 16 bytes at once; 0 if there are none
    ragged     the same if a contiguous dimension is no multiple of 16 bytes
    balance    operations of a product in the time in which a byte is moved

    The others are 0 if there are no programs of many lanes.

    units      multiprocessors, each of which runs several programs
    held       the longest row that a program holds in registers, in elements
    summed     the same if it also sums columns, which takes registers
    launch     elements that are read in the time that a launch takes
    start      seconds that a launch takes
    moved      bytes that a copy moves while a kernel starts and ends
    cache      bytes that are still there when several programs read their rows again
    programs   programs that a launch should have
    enough     programs below which multiprocessors idle
    busy       the same for parts of rows with sums over columns, which are long programs
    lanes      elements that a program computes at once
    chunk      elements of a long row that a program reads at once
    panel      columns of one program, whose rows are cache lines of halves
    least_rows, least_row  rows of a panel, and elements of one row, that are worth a program
    """

    buffers: int
    relies: bool = False
    units: int = 0
    held: int = 0
    summed: int = 0
    launch: int = 0
    cache: int = 0
    raises: bool = False
    paged: bool = False
    bandwidth: float = 0.0
    adds: float = 0.0
    cached: float = 0.0
    products: float = 0.0
    ragged: float = 0.0
    balance: float = 100.0
    start: float = 0.0
    moved: int = 0
    programs: int = 0
    enough: int = 0
    busy: int = 0
    lanes: int = 0
    chunk: int = 0
    panel: int = 0
    least_rows: int = 0
    least_row: int = 0

    def __post_init__(self) -> None:
        needed = ("bandwidth", "adds", "cached", "programs", "enough", "lanes", "chunk", "panel")
        if self.units and not all(getattr(self, name) for name in needed):
            raise InternalError(f"a machine with programs says its {', '.join(needed)}")
