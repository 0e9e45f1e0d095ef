"""The machine that code is compiled for, as data."""

from __future__ import annotations

from lenz.errors import InternalError
from lenz.records import dataclass

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
    """What a machine can do: the numbers behind decisions.

    buffers    most pointers of one kernel; more run out of registers or streams
    relies     kernels rely on checks of their plan: aligned pointers, and upper bounds on sizes
    raises     a failed check ends the call before the next launch
    paged      memory is mapped page by page where it is first touched
    bandwidth  bytes per second that a copy reads and writes
    adds       additions of f32 per second
    cached     speed of the second-level cache relative to memory
    products   operations per second in matrix products of halves on tensor cores, which take 16
               bytes at once; 0 without them
    ragged     the same if a contiguous dimension is not a multiple of 16 bytes
    balance    operations of a product in the time that moves one byte

    The others are 0 on machines without programs of many lanes.

    units      multiprocessors, each of which runs several programs
    held       the longest row that a program holds in registers, in elements
    summed     the same if it also sums columns, which needs registers
    launch     elements read in the time of a launch
    start      seconds per launch
    moved      bytes that a copy moves while a kernel starts and ends
    cache      bytes that stay cached when several programs read their rows again
    programs   wanted programs per launch
    enough     number of programs below which multiprocessors idle
    busy       the same for long programs: parts of rows with sums over columns
    lanes      elements that a program computes at a time
    chunk      elements of a long row that a program reads at a time
    panel      columns of one program, whose rows are cache lines of halves
    least_rows, least_row  fewest rows of a panel, and elements of one row, worth a program
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
            raise InternalError(f"a machine with programs must give its {', '.join(needed)}")
