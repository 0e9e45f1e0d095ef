"""Kernels for CPUs: LLVM IR text with explicit vectors, compiled in the process."""
