"""Kernels for GPUs: Triton text, compiled to cubins outside the user's process."""
