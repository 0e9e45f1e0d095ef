"""What the first calls of a graph run: eager while kernels are compiled."""
