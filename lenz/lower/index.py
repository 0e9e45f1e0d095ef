"""Reads at computed positions: gather, index, embedding."""
