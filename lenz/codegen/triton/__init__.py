"""Kernels for GPUs: Triton text, compiled to cubins outside of the user's process."""
