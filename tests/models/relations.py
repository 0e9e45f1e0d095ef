"""Graphs, tables, users and things: message passing, embedding bags, factorisation."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.example import Example, classes, plain, waves

NODES, EDGES, WIDTH = 18, 60, 16


def graph() -> tuple[Tensor, Tensor]:
    """Features of nodes [NODES, WIDTH], and edges [2, EDGES] from row 0 to row 1."""
    return torch.randn(NODES, WIDTH), torch.randint(0, NODES, (2, EDGES))


class Convolved(nn.Module):
    """GCN: the mean over neighbours by degrees, summed with index_add."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 24), nn.Linear(24, classes)])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        start, end = edges
        degree = torch.zeros(x.shape[0], dtype=x.dtype, device=x.device)
        degree = degree.index_add(0, end, torch.ones_like(end, dtype=x.dtype)) + 1
        weight = degree.rsqrt()
        for k, layer in enumerate(self.layers):
            x = layer(x)
            sent = x[start] * (weight[start] * weight[end])[:, None]
            x = torch.zeros_like(x).index_add(0, end, sent) + x / degree[:, None]
            x = F.relu(x) if k == 0 else x
        return x


def gcn() -> Example:
    """A GCN."""
    return Example(Convolved(), graph(), plain, classes)


class Attentive(nn.Module):
    """GAT: a softmax over the edges that enter a node, by scatter_reduce and scatter_add."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.enter, self.leave = nn.Linear(WIDTH, heads * 8), nn.Linear(heads * 8, 5)
        self.source, self.target = (nn.Parameter(torch.randn(heads, 8) * 0.3) for _ in range(2))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        start, end = edges
        y = self.enter(x).view(-1, self.heads, 8)
        score = F.leaky_relu((y * self.source).sum(-1)[start] + (y * self.target).sum(-1)[end], 0.2)
        place = end[:, None].expand_as(score)
        empty = score.new_full((x.shape[0], self.heads), -torch.inf)
        top = empty.scatter_reduce(0, place, score, "amax").detach()
        share = torch.exp(score - top.gather(0, place))
        total = torch.zeros_like(empty).scatter_add(0, place, share)
        share = share / (total.gather(0, place) + 1e-9)
        sent = y[start] * share[..., None]
        out = torch.zeros_like(y).index_put((end,), sent, accumulate=True)
        made: Tensor = self.leave(F.elu(out.flatten(1)))
        return made


def gat() -> Example:
    """A GAT."""
    return Example(Attentive(), graph(), plain, classes)


class Messages(nn.Module):
    """Message passing on edge features: maxima and means over edges, and one number per graph."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * WIDTH, 24), nn.SiLU(), nn.Linear(24, WIDTH))
        self.node = nn.GRUCell(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, edges: Tensor, member: Tensor) -> Tensor:
        """member: [NODES], the graph of each node."""
        start, end = edges
        for _ in range(2):
            sent = self.edge(torch.cat([x[start], x[end] - x[start]], -1))
            place = end[:, None].expand_as(sent)
            zero = torch.zeros_like(x)
            high = zero.scatter_reduce(0, place, sent, "amax", include_self=False)
            mean = zero.scatter_reduce(0, place, sent, "mean", include_self=False)
            x = self.node(torch.cat([high, mean], -1), x)
        pooled = x.new_zeros(3, WIDTH).index_add(0, member, x)
        out: Tensor = self.head(pooled).squeeze(-1)
        return out


def messages() -> Example:
    """A message-passing net over three graphs in one batch."""
    inputs = (*graph(), torch.arange(NODES) % 3)
    return Example(Messages(), inputs, plain, waves)


class PointCloud(nn.Module):
    """DGCNN: edges to the nearest neighbours, found in the net itself."""

    def __init__(self, near: int = 4) -> None:
        super().__init__()
        self.near = near
        self.edge = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, points, 3]."""
        far = torch.cdist(x, x)
        near = far.topk(self.near, largest=False).indices
        wide = near.flatten(1)[..., None].expand(-1, -1, 3)
        other = x.gather(1, wide).view(*near.shape, 3)
        mine = x[:, :, None].expand_as(other)
        y = self.edge(torch.cat([mine, other - mine], -1)).amax(2)
        out: Tensor = self.head(y.mean(1))
        return out


def points() -> Example:
    """A net on point clouds."""
    return Example(PointCloud(), (torch.randn(3, 14, 3),), plain, classes)


class Clicks(nn.Module):
    """DLRM: bags of embeddings, a perceptron for numbers, products of all pairs."""

    def __init__(self, rows: int = 50, width: int = 8, bags: int = 3) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(bags))
        self.low = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        pairs = (bags + 1) * bags // 2
        self.high = nn.Sequential(nn.Linear(pairs + width, 16), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("pairs", torch.tril_indices(bags + 1, bags + 1, -1))

    def forward(self, numbers: Tensor, items: Tensor, starts: Tensor) -> Tensor:
        """numbers: [batch, 5]; items: [bags, total]; starts: [bags, batch]."""
        low = self.low(numbers)
        found = [bag(i, s) for bag, i, s in zip(self.bags, items, starts, strict=True)]
        every = torch.stack([low, *found], 1)
        products = torch.bmm(every, every.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        out: Tensor = self.high(torch.cat([low, products], 1)).squeeze(-1)
        return out


def clicked(out: Tensor, *_: Tensor) -> Tensor:
    """Cross entropy of yes and no; every third example is yes."""
    target = (torch.arange(out.shape[0], device=out.device) % 3 == 0).to(out.dtype)
    return F.binary_cross_entropy_with_logits(out, target)


def dlrm() -> Example:
    """A DLRM."""
    starts = torch.tensor([[0, 3, 3, 7, 12, 15]]).repeat(3, 1)
    return Example(
        Clicks(), (torch.randn(6, 5), torch.randint(0, 50, (3, 20)), starts), plain, clicked
    )


class WideDeep(nn.Module):
    """DeepFM: single weights, products of factors in linear time, and a perceptron."""

    def __init__(self, rows: int = 80, fields: int = 6, width: int = 8) -> None:
        super().__init__()
        self.single, self.table = nn.Embedding(rows, 1), nn.Embedding(rows, width)
        self.deep = nn.Sequential(
            nn.Linear(fields * width, 24), nn.BatchNorm1d(24), nn.PReLU(), nn.Linear(24, 1)
        )

    def forward(self, items: Tensor) -> Tensor:
        v = self.table(items)
        cross = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(-1)
        out: Tensor = self.single(items).sum((1, 2)) + cross + self.deep(v.flatten(1)).squeeze(-1)
        return out


def deepfm() -> Example:
    """A factorisation machine with a deep part."""
    return Example(WideDeep(), (torch.randint(0, 80, (7, 6)),), plain, clicked)


class Towers(nn.Module):
    """Two towers with a triplet loss; means of bags of a fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(40, 12, mode="mean")
        self.things = nn.Sequential(nn.Embedding(40, 12), nn.Linear(12, 12), nn.Tanh())

    def forward(self, user: Tensor, good: Tensor, bad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.users(user), self.things(good), self.things(bad)


def towers() -> Example:
    """Two towers."""
    inputs = (torch.randint(0, 40, (6, 4)), *torch.randint(0, 40, (2, 6)))

    def triplet(out: tuple[Tensor, ...], *_: Tensor) -> Tensor:
        return F.triplet_margin_loss(*out) + 0.1 * F.cosine_embedding_loss(
            out[0], out[1], torch.ones(6, device=out[0].device)
        )

    return Example(Towers(), inputs, plain, triplet)


MODELS: dict[str, Callable[[], Example]] = {
    "GCN": gcn,
    "GAT": gat,
    "Message passing": messages,
    "Point cloud": points,
    "DLRM": dlrm,
    "DeepFM": deepfm,
    "Two towers": towers,
}
