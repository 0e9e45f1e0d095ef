"""Capture steps of a plan as a CUDA graph.

The steps run once while the driver records their launches. Kernels of lenz become nodes with known
arguments, so that their addresses can be set before a replay.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lenz.ir.plan import Alloc, LaunchStep, owners_of
from lenz.machine.cuda import driver
from lenz.runtime.captured import Captured, KernelNode, Runner, Wanted

HIDDEN = 4  # null arguments after a kernel's own; see Binary.extra
# CUDA_KERNEL_NODE_PARAMS: function, grid x y z, block x y z, shared memory, arguments, and three
# fields that are null.
NODE = "=Q7I4xQQQQ"
RECORD = f"={driver.CONFIG}Q"  # grid, block and shared memory of a launch, ..., the handle
# One launch of copy.ptx: pieces, bytes of a piece (8 rounds of its 32 blocks), blocks, threads.
PIECES, PIECE, BLOCKS, THREADS = 160, 1 << 20, 32, 256


@cache
def side_stream(gpu: int, stream: int) -> torch.cuda.Stream:
    """The stream on which graphs of a stream are captured. Libraries keep workspaces for it."""
    return torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]  # torch's


class GraphMemory:
    """The memory of graphs, which torch frees when the last graph is dropped."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()


@cache
def _pools() -> WeakValueDictionary[tuple[int, int], GraphMemory]:
    return WeakValueDictionary()


def pool(gpu: int, stream: int) -> GraphMemory:
    """Memory that a stream's graphs share, since they need it only while they run."""
    return _pools().setdefault((gpu, stream), GraphMemory())


class Exec:
    """An executable graph of the driver, alive while it is referenced."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __del__(self) -> None:
        with suppress(Exception):  # the process ends, and the driver is gone
            driver.library().cuGraphExecDestroy(ctypes.c_void_p(self.handle))

    def start(self, stream: int) -> None:
        """Launch it with the captured addresses."""
        told = ctypes.c_void_p(self.handle), ctypes.c_void_p(stream)
        driver.check(driver.library().cuGraphLaunch(*told), "launching a CUDA graph")


def capture_graph(w: Wanted, like: Runner, gpu: int) -> Captured:
    """Capture a graph on the current device; raises RuntimeError if the driver or torch cannot.

    `like` has the kernels and sizes.
    """
    side = side_stream(gpu, like.stream)
    memory = GraphMemory() if keeps_its_own(w) else pool(gpu, like.stream)
    copier(gpu)  # no code may be loaded during a capture
    side.wait_stream(torch.cuda.current_stream(gpu))
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    run = _Capture(w, like, gpu, driver.OwnStream(side.cuda_stream))
    with torch.cuda.stream(side), torch.no_grad():
        generator = torch.cuda.default_generators[gpu]
        before = generator.clone_state()
        graph.capture_begin(pool=memory.handle, capture_error_mode="thread_local")
        try:
            try:
                run.all()
            finally:
                graph.capture_end()
        except RuntimeError:
            generator.graphsafe_set_state(before)  # otherwise it stays in the capturing state
            raise
    torch.cuda.current_stream(gpu).wait_stream(side)
    exec, raw = ctypes.c_void_p(), ctypes.c_void_p(graph.raw_cuda_graph())
    made = driver.library().cuGraphInstantiateWithFlags(ctypes.byref(exec), raw, 0)
    driver.check(made, "instantiating a CUDA graph")
    ready = Exec(exec.value or 0)
    alive = graph, memory, like.functions  # constants live with the plan; arguments are not ours
    # Nothing else holds kept memory yet, so these are its reference counts when unused.
    counts = [t.untyped_storage()._cdata + 8 for t in run.results.values()]
    owners = [(at, ctypes.c_uint32.from_address(at).value) for at in counts]
    return Captured(ready.handle, run.results, owners, run.nodes, run.uses, ready.start, alive)


class _Capture(Runner):
    """Runs the steps of a capture."""

    def __init__(self, w: Wanted, like: Runner, gpu: int, stream: int) -> None:
        super().__init__(like.functions, {**w.fixed, **w.reads}, like.sizes, like.value, stream)
        self.w, self.gpu = w, gpu
        self.given = {**w.reads, **w.writes}
        self.origins = {name: name for name in w.reads if name not in w.copied}
        self.nodes: list[KernelNode] = []
        self.uses: dict[str, list[tuple[int, int, int]]] = {}
        self.results: dict[str, Tensor] = {}
        # Kept memory must not be in the pool, which other graphs share.
        owners, known = kept_memory(w), {*w.writes}
        found = [s for s in w.steps if isinstance(s, Alloc) and s.name in owners - known]
        self.before = {s.name: super(_Capture, self).memory(s) for s in found}

    def all(self) -> None:
        """Run all steps."""
        taken = {name: t for name, t in self.w.reads.items() if name in self.w.copied}
        inside = {name: beside(t) for name, t in taken.items()}
        self.copy([(name, inside[name], t, True) for name, t in taken.items()])
        self.env |= inside
        inside = {name: t for name, t in inside.items() if name in self.w.mutated}
        for s in self.w.steps:
            self.step(s)
        given = {name: t for name, t in self.w.writes.items() if name in self.w.copied}
        for name, t in given.items():
            if not same_layout(self.results[name], t):
                raise RuntimeError(f"{name} has other strides than promised")
        self.copy([(name, t, self.results[name], False) for name, t in given.items()])
        self.copy([(name, taken[name], t, False) for name, t in inside.items()])
        self.results = {name: self.results[name] for name in self.w.kept}
        self.env.clear()

    def copy(self, jobs: Sequence[tuple[str, Tensor, Tensor, bool]]) -> None:
        """Copy memory. A job: the moving tensor, target, source, and whether it is the source."""
        pieces = [
            (name, to.data_ptr() + at, start.data_ptr() + at, min(PIECE, extent(to) - at), moves)
            for name, to, start, moves in jobs
            for at in range(0, extent(to), PIECE)
        ]
        for k in range(0, len(pieces), PIECES):
            rows = pieces[k : k + PIECES]
            table = (ctypes.c_uint64 * (3 * PIECES))(*[x for p in rows for x in p[1:4]])
            node = KernelNode(0, None, table)
            node.parameters = node_params(
                copier(self.gpu), (BLOCKS, len(rows)), THREADS, 0, [table]
            )
            launch(node.parameters, self.stream)
            node.handle = self.last()
            for row, (name, to, start, _, moves) in enumerate(rows):
                origin = self.given[name].data_ptr()
                place, address = (3 * row + 1, start) if moves else (3 * row, to)
                self.uses.setdefault(name, []).append((len(self.nodes), place, address - origin))
            self.nodes.append(node)

    def name(self, name: str, t: Tensor, source: str = "") -> None:
        """Name a tensor, and record it if it leaves the graph."""
        self.env[name] = t
        if source in self.origins:
            self.origins[name] = self.origins[source]
        if name in self.w.kept or name in self.w.writes:
            self.results[name] = t

    def memory(self, s: Alloc) -> Tensor:
        """New memory of the graph, or that of a result."""
        if s.name in self.w.writes and s.name not in self.w.copied:
            self.origins[s.name] = s.name
            return self.w.writes[s.name]
        return self.before[s.name] if s.name in self.before else super().memory(s)

    def launch(self, s: LaunchStep) -> list[int]:
        """Launch a kernel, and describe its node if it has an address that may change."""
        given = super().launch(s)
        assert s.grid is not None
        if (programs := self.size(s.grid)) == 0 or not any(a in self.origins for a in s.args):
            return given
        record = self.functions[s.kernel].record
        _, _, _, threads, _, _, shared, *_, handle = struct.unpack_from(RECORD, record)
        values = (ctypes.c_int64 * len(given))(*[v - (1 << 64) if v >> 63 else v for v in given])
        each = [ctypes.c_int64.from_buffer(values, 8 * k) for k in range(len(given))]
        params = node_params(handle, (programs, 1), threads, shared, each)
        node = KernelNode(self.last(), params, values)
        for k, a in enumerate(s.args):
            if origin := self.origins.get(a):
                use = len(self.nodes), k, given[k] - self.given[origin].data_ptr()
                self.uses.setdefault(origin, []).append(use)
        self.nodes.append(node)
        return given

    def last(self) -> int:
        """The node of the last launch."""
        status, ident, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
        graph, last = ctypes.c_void_p(), ctypes.POINTER(ctypes.c_void_p)()
        refs = map(ctypes.byref, (status, ident, graph, last, count))
        asked = driver.library().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(self.stream), *refs)
        driver.check(asked, "capturing a CUDA graph")
        if count.value != 1:
            raise RuntimeError("the last launch is not a single node")
        return last[0] or 0


def kept_memory(w: Wanted) -> set[str]:
    """The first buffers of kept memory."""
    owners = owners_of(w.steps)
    return {owners.get(n, n) for n in w.kept}


def keeps_its_own(w: Wanted) -> bool:
    """Whether libraries allocate kept memory, so that the graph needs its own pool."""
    known = {s.name for s in w.steps if isinstance(s, Alloc)} | {*w.fixed, *w.reads}
    return not kept_memory(w) <= known


@cache
def copier(gpu: int) -> int:
    """The handle of the kernel in copy.ptx, compiled by the driver."""
    text = (files("lenz.machine.cuda") / "copy.ptx").read_bytes() + b"\0"
    with torch.cuda.device(gpu):
        return driver.load_function(text, "copy_pieces")[1]


def node_params(
    handle: int, grid: tuple[int, int], threads: int, shared: int, arguments: Sequence[Any]
) -> Any:
    """CUDA_KERNEL_NODE_PARAMS of a launch; it keeps the arguments alive."""
    zero = ctypes.c_uint64(0)
    starts = [ctypes.addressof(a) for a in arguments] + [ctypes.addressof(zero)] * HIDDEN
    table = (ctypes.c_uint64 * len(starts))(*starts)
    made = ctypes.create_string_buffer(struct.calcsize(NODE))
    told = handle, *grid, 1, threads, 1, 1, shared, ctypes.addressof(table), 0, 0, 0
    struct.pack_into(NODE, made, 0, *told)
    made.alive = (*arguments, zero, table)  # type: ignore[attr-defined]  # it holds their addresses
    return made


def launch(parameters: Any, stream: int) -> None:
    """Launch a kernel with the parameters of its node."""
    handle, gx, gy, gz, bx, by, bz, shared, table, *_ = struct.unpack_from(NODE, parameters)
    where = ctypes.c_void_p(stream), ctypes.c_void_p(table), None
    told = ctypes.c_void_p(handle), gx, gy, gz, bx, by, bz, shared
    driver.check(driver.library().cuLaunchKernel(*told, *where), "copying memory")


def beside(t: Tensor) -> Tensor:
    """A new tensor with the same sizes and strides."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether sizes, dtype and strides agree, ignoring strides of size-1 dimensions.

    cuDNN gives a channels-last gradient of depthwise weights, [n, 1, k, k], another stride there.
    """
    steps = zip(a.shape, a.stride(), b.stride(), strict=True)
    return a.shape == b.shape and a.dtype == b.dtype and all(n == 1 or x == y for n, x, y in steps)


def extent(t: Tensor) -> int:
    """Bytes from the first element of a tensor to just past its last one."""
    if t.numel() == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.itemsize
