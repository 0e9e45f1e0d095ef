"""A small CNN trained on scikit-learn's digits, by eager and by lenz from the same seed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.demo.tables import progress, say, table

EPOCHS = 6
BATCH = 64
TRAIN = 1437  # of 1797 images; the rest is for the test
MAX_DIFFERENCE = 1e-4


@dataclass(frozen=True, slots=True)
class Digits:
    """Images f32[n, 1, 8, 8] in 0..1 and their digits i64[n]."""

    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Trained:
    """Mean loss of each epoch, its seconds, and the share of test images that are named rightly."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    accuracy: float


def load() -> Digits:
    """The 1797 scanned digits that scikit-learn carries."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    digits = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    images, digits = images[order], digits[order]
    return Digits((images[:TRAIN], digits[:TRAIN]), (images[TRAIN:], digits[TRAIN:]))


def network() -> nn.Module:
    """Two convolutions with batch norm, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def train(data: Digits, backend: str, epochs: int, options: dict[str, Any]) -> Trained:
    """Train from seed 0 with Adam; `backend` and `options` are those of torch.compile."""
    torch.manual_seed(0)
    net = network()
    criterion = nn.CrossEntropyLoss()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = criterion(net(x), y)
        return loss

    compiled = loss_of
    if backend != "eager":
        compiled = torch.compile(loss_of, backend=backend, options=options)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    images, digits = data.train
    losses, times = [], []
    for epoch in progress(range(epochs), f"training, {backend}"):
        order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(epoch))
        total, start = 0.0, time.perf_counter()
        # The last batch would be short; it is left out, as data loaders do.
        for k in range(0, TRAIN - BATCH + 1, BATCH):
            chosen = order[k : k + BATCH]
            optimizer.zero_grad()
            loss = compiled(images[chosen], digits[chosen])
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it
            optimizer.step()
            total += float(loss.detach())
        losses.append(total / (TRAIN // BATCH))
        times.append(time.perf_counter() - start)
    net.train(False)
    with torch.no_grad():
        right = (net(data.test[0]).argmax(1) == data.test[1]).float().mean()
    return Trained(tuple(losses), tuple(times), float(right))


def run(cache: Path) -> bool:
    """Train both ways, compare the loss curves, print; True when they agree."""
    say("Training a small CNN on handwritten digits, by eager and by lenz ...")
    data = load()
    slow = train(data, "eager", EPOCHS, {})
    fast = train(data, "lenz", EPOCHS, {"cache_dir": str(cache)})
    table(
        f"Loss by epoch, {TRAIN} digits to learn, {len(data.test[1])} to test",
        ("epoch", "eager", "lenz", "difference", "eager s", "lenz s"),
        [
            (k + 1, f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}", f"{s:.2f}", f"{t:.2f}")
            for k, (a, b, s, t) in enumerate(
                zip(slow.losses, fast.losses, slow.seconds, fast.seconds, strict=True)
            )
        ],
    )
    say(f"Accuracy on the test digits: eager {slow.accuracy:.1%}, lenz {fast.accuracy:.1%}")
    pairs = zip(slow.losses, fast.losses, strict=True)
    return all(abs(a - b) <= MAX_DIFFERENCE for a, b in pairs)
