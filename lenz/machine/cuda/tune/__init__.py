"""Tune tiles of GPU kernels: the candidates, the timing, the choice."""
