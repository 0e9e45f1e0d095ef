"""The capabilities of GPUs: those of an H200.

Other GPUs use them as well, because the tiles in `shape.py` were fitted on an H200.
"""

from __future__ import annotations

from lenz.target import Capabilities

CAN = Capabilities(
    buffers=48,  # pointers are uniform registers or constants
    relies=True,
    units=132,
    held=32768,
    summed=8192,
    launch=1 << 18,
    start=2e-6,
    moved=8 << 20,
    cache=64 << 20,
    bandwidth=4e12,
    adds=32e12,
    cached=4.0,
    products=600e12,  # of bf16
    ragged=150e12,
    programs=1024,
    enough=256,
    busy=96,
    lanes=1024,
    chunk=8192,
    panel=64,
    least_rows=64,
    least_row=4096,
)
