"""Tiles of GPU kernels by measurement: what may be chosen, how it is timed, the choice."""
