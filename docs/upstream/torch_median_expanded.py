"""The median of equal numbers that are one element in memory is another number."""

import torch

for number in (-2.0, 1.0, 3.0):
    found = torch.full((1, 1), number).expand(8, 1).median(0).values
    print(f"median of eight times {number}: {found.item()}")
