"""Constants of plans as bytes, named by their content: equal constants have one name."""

from __future__ import annotations

import hashlib
import json

import torch


def whole_memory(t: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor from its first element to its last one, in one dimension."""
    steps = zip(t.shape, t.stride(), strict=True)
    span = 1 + sum((n - 1) * s for n, s in steps) if t.numel() else 0
    return torch.as_strided(t.detach(), (span,), (1,))


def packed(t: torch.Tensor) -> tuple[str, bytes]:
    """A constant's name (the hash of its bytes) and bytes: type, sizes, strides and memory."""
    head = json.dumps([str(t.dtype).removeprefix("torch."), tuple(t.shape), t.stride()])
    data = f"{head}\n".encode() + whole_memory(t).view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.sha256(data).hexdigest(), data


def unpacked(data: bytes, device: str) -> torch.Tensor:
    """The constant with these bytes, in new memory of a device."""
    head, _, memory = data.partition(b"\n")
    dtype, size, stride = json.loads(head)
    type = getattr(torch, dtype)
    # frombuffer rejects an empty buffer.
    made = torch.frombuffer(bytearray(memory), dtype=type) if memory else torch.empty(0, dtype=type)
    return torch.as_strided(made.to(device), size, stride)
