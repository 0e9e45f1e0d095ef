"""What is checked on several ranks: values and gradients as eager has them, and no warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import lenz
from tests.distributed import meshes
from tests.distributed.programs import ROWS, arguments, as_function, drawn
from tests.distributed.ranks import Check, Rank

ops: Any = torch.ops._c10d_functional


def either(new: str, old: str, module: Any = collectives) -> Any:
    """A function that has another name in torch 2.13 than in 2.11."""
    return getattr(module, new, None) or getattr(module, old)


GATHER = either("all_gather_single_autograd", "all_gather_tensor_autograd")
SCATTER = either("reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd")
INTO = either("all_gather_single", "all_gather_into_tensor", dist)
OPTIONS: dict[str, Any] = {"verify": True, "on_error": "raise"}


def compiled(f: Any, **rest: Any) -> Any:
    return torch.compile(f, backend="lenz", options=OPTIONS, **rest)


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)


def same(f: Callable[..., Any], *args: Tensor, calls: int = 2, exact: bool = False) -> None:
    """Calls give what eager gives, gradients too, and leave arguments as eager does."""
    torch._dynamo.reset()
    run = compiled(f, fullgraph=True)
    for _ in range(calls):
        found = [outcome(g, args) for g in (f, run)]
        if exact:
            torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
        else:
            close(found[1], found[0])


def outcome(f: Callable[..., Any], args: tuple[Tensor, ...]) -> Any:
    given = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
    results = f(*given)
    leaves = [a for a in given if a.requires_grad]
    if leaves:
        results = results if isinstance(results, tuple) else (results,)
        total: Any = sum(r.sin().sum() for r in results)
        total.backward()
    return results, given, [a.grad for a in leaves]


def functional(rank: Rank, kind: str, grad: bool = False) -> None:
    """A collective whose argument is dead when it is started, and a product in its place."""
    n = 64 * rank.size
    parts = [n // rank.size] * rank.size
    name, size = rank.group, rank.size
    own: Any = torch.ops._c10d_functional_autograd

    def f(x: Tensor) -> Any:
        t, u = x * 2, x.sin()
        start = {
            "all_reduce": lambda: [ops.all_reduce(t, "sum", name)],
            "all_reduce_max": lambda: [ops.all_reduce(t, "max", name)],
            "all_reduce_coalesced": lambda: ops.all_reduce_coalesced([t, u], "sum", name),
            "all_gather": lambda: [ops.all_gather_into_tensor(t, size, name)],
            "all_gather_coalesced": lambda: ops.all_gather_into_tensor_coalesced(
                [t, u], size, name
            ),
            "reduce_scatter": lambda: [ops.reduce_scatter_tensor(t, "sum", size, name)],
            "reduce_scatter_coalesced": lambda: ops.reduce_scatter_tensor_coalesced(
                [t, u], "sum", size, name
            ),
            "all_to_all": lambda: [ops.all_to_all_single(t, parts, parts, name)],
            "broadcast": lambda: [ops.broadcast(t, 0, name)],
            "own all_gather": lambda: [own.all_gather_into_tensor(t, size, name)],
            "own reduce_scatter": lambda: [own.reduce_scatter_tensor(t, "sum", size, name)],
            "own all_to_all": lambda: [own.all_to_all_single(t, parts, parts, name)],
        }[kind]
        flying = start()
        z = torch.mm(x + 5, x) / n
        return (*(ops.wait_tensor(y) + 1 for y in flying), z)

    same(f, rank.randn(n, n).requires_grad_(grad))


FUNCTIONAL = """
all_reduce all_reduce_max all_reduce_coalesced all_gather all_gather_coalesced reduce_scatter
reduce_scatter_coalesced all_to_all broadcast
"""


def all_functional(rank: Rank) -> None:
    for kind in FUNCTIONAL.split():
        functional(rank, kind)
    for kind in ("own all_gather", "own reduce_scatter", "own all_to_all"):
        functional(rank, kind, grad=True)


def memory_of_a_gather(rank: Rank) -> None:
    """Large enough that the collective is still under way when the product is made."""

    def f(x: Tensor) -> Any:
        t = x * 2
        gathered = ops.all_gather_into_tensor(t, rank.size, rank.group)
        z = x + 5
        z = torch.mm(z, z)
        return ops.wait_tensor(gathered), z

    same(f, rank.randn(512, 512), calls=3)


def inplace_and_autograd(rank: Rank) -> None:
    """The collectives of torch.distributed, and those that torch offers to compiled programs."""

    def f(x: Tensor) -> Any:
        y = x * 2
        dist.all_reduce(y)
        out = x.new_empty(rank.size * x.shape[0], x.shape[1])
        INTO(out, y + x)
        x.add_(1)
        return y + 1, out

    same(f, rank.randn(8, 8))

    def g(x: Tensor) -> Any:
        world: Any = dist.group.WORLD
        a = GATHER(x.cos(), 0, world)
        b = SCATTER(a.sin(), "sum", 0, world)
        return a + 1, b * x

    same(g, rank.randn(8, 8).requires_grad_())

    def h(x: Tensor) -> Any:
        return x.wait() * 2 if hasattr(x, "wait") else x * 2  # a result that is under way

    def flying(run: Callable[[Tensor], Tensor]) -> Tensor:
        return run(collectives.all_reduce(rank.randn(64, 64), "sum", dist.group.WORLD))  # type: ignore[arg-type]

    close(flying(compiled(h)), flying(h))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


def model(rank: Rank, width: int = 32, depth: int = 3) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(Block(width) for _ in range(depth))).to(rank.device)


def steps(m: Any, x: Tensor, parameters: list[Any], count: int = 3) -> list[Tensor]:
    """Losses of training steps, then the parameters."""
    # One by one: some parameters may be DTensors, and others not.
    optimizer = torch.optim.SGD(parameters, 0.1, foreach=False)
    said = []
    for _ in range(count):
        loss = m(x).sin().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append(loss.detach())
    return said + [whole(p) for p in parameters]


def whole(p: Any) -> Tensor:
    p = p.detach()
    made: Tensor = p.full_tensor() if hasattr(p, "full_tensor") else p
    return made


def trains(
    rank: Rank,
    prepare: Callable[[nn.Sequential], Any],
    compile: Callable[[Any], Any],
    local: bool = True,
    width: int = 32,
) -> None:
    """A few steps of training as in eager, and nothing runs in eager that could be compiled."""
    own, other = prepare(model(rank, width)), prepare(model(rank, width))
    x = rank.randn(8, width, seed=3, same=not local)
    want = steps(own, x, list(own.parameters()))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = compile(other)
        got = steps(run, x, list(other.parameters()))
    told = [str(w.message) for w in said if "lenz" in str(w.message)]
    assert not told, told
    close(got, want)


def data_parallel(rank: Rank) -> None:
    """Buckets that are smaller than the model, between which Dynamo cuts the graph."""
    ids = [rank.number] if "cuda" in rank.device else None
    wrap = partial(DistributedDataParallel, device_ids=ids, bucket_cap_mb=1)
    graphs = []

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return lenz.backend(gm, inputs, options=OPTIONS)

    trains(rank, wrap, lambda m: torch.compile(m, backend=backend), width=256)
    assert len(graphs) > 1, "the graph was not cut"


def sharded_blocks(rank: Rank) -> None:
    from torch.distributed.fsdp import fully_shard

    def prepare(m: nn.Sequential) -> Any:
        for block in m:
            fully_shard(block)
        return fully_shard(m)

    def compile(m: Any) -> Any:
        for block in m:
            block.compile(backend="lenz", options=OPTIONS)
        return m

    trains(rank, prepare, compile)


def sharded_whole(rank: Rank) -> None:
    from torch.distributed.fsdp import fully_shard

    trains(rank, fully_shard, compiled)


def tensor_parallel(rank: Rank) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(rank.device.partition(":")[0], (rank.size,))

    def prepare(m: nn.Sequential) -> Any:
        for block in m:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return m

    trains(rank, prepare, compiled, local=False)


def sequence_parallel(rank: Rank) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(rank.device.partition(":")[0], (rank.size,))

    def prepare(m: nn.Sequential) -> Any:
        plan = {
            "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        for block in m:
            parallelize_module(block, mesh, plan)
        return m

    trains(rank, prepare, compiled)


def redistributed(rank: Rank) -> None:
    """Meshes are arguments of the graph, and come back with the results."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh(rank.device.partition(":")[0], (rank.size,))

    def f(x: Tensor) -> Any:
        d = DTensor.from_local(x, mesh, [Shard(0)])
        e = d.redistribute(mesh, [Replicate()]).sin() * 2
        return e.redistribute(mesh, [Shard(1)]).to_local(), e  # type: ignore[attr-defined]

    x = rank.randn(4, 4 * rank.size)
    (a, d), (b, e) = f(x), compiled(f, fullgraph=True)(x)
    assert e.device_mesh == mesh and e.placements == d.placements
    close((b, e.to_local()), (a, d.to_local()))


@dataclass
class Order(TorchDispatchMode):
    """The collectives that eager calls, by name, in order."""

    def __post_init__(self) -> None:
        super().__init__()
        self.space = "_c10d_functional."
        self.seen: list[str] = []

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(f).startswith(self.space):
            self.seen.append(str(f))
        return f(*args, **(kwargs or {}))


def random_program(rank: Rank, seed: int, lines: int = 20) -> None:
    """Values as in eager; and one order of collectives, which is eager's, on all ranks."""
    f = as_function(drawn(seed, lines, real=True), rank.group, rank.size)
    args = arguments(seed, rank.number, rank.device)
    same(f, *args)
    with Order() as order:
        f(*(a.clone() for a in args))
    report = lenz.explain(f, options=OPTIONS)(*(a.clone() for a in args))
    called = [s.op for g in report.graphs for s in g.externs if s.op.startswith(order.space)]
    assert called == order.seen, "collectives are not called in the order of the program"
    told: list[Any] = [None] * rank.size
    dist.all_gather_object(told, called)
    assert all(t == told[0] for t in told), "ranks call collectives in different orders"


def random_programs(seeds: range) -> list[Check]:
    return [partial(random_program, seed=s) for s in seeds]


@cache
def mesh_of(rank: Rank) -> Any:
    """One mesh: where graphs have two that are equal, torch's partitioner fails."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(rank.device.partition(":")[0], (rank.size,))


def random_mesh_program(rank: Rank, seed: int, lines: int = 12) -> None:
    """Distributed tensors in and out: values, gradients and placements as in eager."""
    mesh, local = mesh_of(rank), seed % 2 == 0
    f = meshes.as_function(meshes.drawn(seed, lines), mesh, local)
    found = []
    for run in (f, compiled(f, fullgraph=True)):
        args = meshes.arguments(seed, mesh, local, rank.device)
        *spread, own = run(*args)
        total: Any = sum(t.full_tensor().sin().sum() for t in spread) + own.cos().sum()
        total.backward()
        found.append([[t.placements for t in spread], *map(whole, (*spread, own))])
        found[-1] += [whole(a.grad) for a in args if a.grad is not None]
    (want_places, *want), (places, *got) = found
    assert places == want_places, f"{places} instead of {want_places}"
    close(got, want)


def random_mesh_programs(seeds: range) -> list[Check]:
    return [partial(random_mesh_program, seed=s) for s in seeds]


ALL: list[Check] = [
    all_functional,
    memory_of_a_gather,
    inplace_and_autograd,
    data_parallel,
    sharded_blocks,
    sharded_whole,
    tensor_parallel,
    sequence_parallel,
    redistributed,
]
# Blocks sharded as a whole, and by tensors, have what blocks in parts and sequences have.
SOME: list[Check] = [all_functional, sharded_blocks, sequence_parallel, redistributed]
assert ROWS % 4 == 0, "four ranks share rows"
