"""The first calls of a graph: eager runs them while kernels are compiled."""
