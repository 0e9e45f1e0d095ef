"""Kernel -> text -> binary, per target. Walks kernels and makes no decisions."""
