"""The tile sizes of kernels, fitted on an H200."""

from __future__ import annotations

from lenz.machine.cuda.capabilities import CAN
from lenz.records import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """Tile sizes of a kernel, in elements. The defaults are the cost model."""

    # Tile of a loop without reductions: 8 per thread of 4 warps, 16 bytes of a half.
    tile: int = CAN.lanes
    # Edge of a tile that one access walks by rows and another by columns: 128 bytes of a half.
    edge: int = 64
    # Longest row that stays in registers: 64 elements per thread of 16 warps. Group norm over rows
    # of 32768 reaches 81% of the copy bandwidth that way, and 70% in a loop.
    row: int = CAN.held
    # Tile of a longer row. The data in flight decides: amax of rows of 32768 reaches 54% of the
    # copy bandwidth with 4096, 94% with 8192.
    chunk: int = CAN.chunk
    # At most one in this many lanes of such tiles may lie beyond the end of the row.
    idle: int = 8
    # Tile of one part of a row that is scanned in parts, and parts per group. The data in flight
    # decides: 2^27 f32 take 401 us in parts of 4096 with 8 warps, 317 us with 4, and 279 us in
    # parts of 8192 with 4; a copy takes 257 us. Groups of 128 gain 2% but lose 15% on 2^20.
    part: int = 8192
    group: int = 64
    # Tile of short rows, and of columns.
    rows: int = 2048
    # Longest row that is sorted in one kernel.
    sort: int = 4096
    # Columns of one program: 128 bytes of a half, so that each row of the tile is a cache line.
    panel: int = CAN.panel
    # The same if there are fewer than 64 panels: 32 bytes, the unit of DRAM.
    narrow: int = 8
    # Elements per thread; 0 means 8, or 16 if a tile is reduced, with at least 4 warps.
    thread: int = 0
    # Maximum warps of a program, and loads of a loop in flight (TileConfig.stages).
    warps: int = 16
    stages: int = 1

    @property
    def is_usual(self) -> bool:
        """True for the cost model's shape; variants are used unchanged, and timing decides."""
        return self == Shape()
