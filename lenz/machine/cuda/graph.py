"""Capture steps of a plan as a CUDA graph.

The steps run once while the driver records their launches. Kernels of lenz become nodes with known
arguments, so that their addresses can be set before a replay.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.resources import files
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from lenz.ir.plan import Alloc, CallStep, LaunchStep, owners_of
from lenz.machine.cuda import driver
from lenz.runtime.captured import Captured, CaptureError, KernelNode, Runner, Wanted
from lenz.runtime.constants import whole_memory

HIDDEN = 4  # null arguments after a kernel's own; see Binary.extra
# CUDA_KERNEL_NODE_PARAMS: function, grid x y z, block x y z, shared memory, arguments, and three
# fields that are null.
NODE = "=Q7I4xQQQQ"
RECORD = f"={driver.CONFIG}Q"  # grid, block and shared memory of a launch, ..., the handle
# One launch of copy.ptx: pieces, bytes of a piece (8 rounds of its 32 blocks), blocks, threads.
PIECES, PIECE, BLOCKS, THREADS = 160, 1 << 20, 32, 256
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: it does not wait for the default stream
THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads may call the driver


class GraphMemory:
    """The memory of graphs, which torch frees when the last graph is dropped."""

    def __init__(self, gpu: int) -> None:
        self.id = torch.cuda.graph_pool_handle()
        torch._C._cuda_beginAllocateCurrentThreadToPool(gpu, self.id)  # makes a user of the pool
        torch._C._cuda_endAllocateToPool(gpu, self.id)
        finalize(self, torch._C._cuda_releasePool, gpu, self.id).atexit = False


@cache
def side_stream(gpu: int, stream: int) -> tuple[Any, Any]:
    """The stream on which graphs of a stream are captured, and memory for cuBLAS's workspace there.

    The stream is not one of the 32 that torch gives out again and again: a capture would take what
    another thread launches on it. Graphs hold the workspace's address. Torch frees a workspace when
    it is told to (`_cuda_clearCublasWorkspaces`), but memory of this pool is never unmapped, and
    nothing else lies there. If a graph's own pool had it, it would be gone with the first graph.
    """
    made = ctypes.c_void_p()
    driver.check(driver.library().cuStreamCreate(ctypes.byref(made), NON_BLOCKING), "new stream")
    return torch.cuda.ExternalStream(made.value, gpu), GraphMemory(gpu)  # type: ignore[no-untyped-call]  # torch's


@cache
def pools() -> WeakValueDictionary[tuple[int, int], GraphMemory]:
    """By GPU and stream, memory that a stream's graphs share: they need it only while they run."""
    return WeakValueDictionary()


def capture_graph(w: Wanted, like: Runner, gpu: int) -> Captured:
    """Capture a graph on the current device; raises RuntimeError if the driver or torch cannot.

    `like` has the kernels and sizes.
    """
    with driver.capture_lock():
        return _captured(w, like, gpu)


def _captured(w: Wanted, like: Runner, gpu: int) -> Captured:
    side, lasting = side_stream(gpu, like.stream)
    memory: Any = GraphMemory(gpu)
    if not keeps_its_own(w):
        memory = pools().setdefault((gpu, like.stream), memory)
    if any(isinstance(s, CallStep) for s in w.steps):  # the workspace must not be in `memory`
        with torch.cuda.stream(side), torch.cuda.use_mem_pool(lasting, gpu):
            torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]  # torch's
    copier(gpu)  # no code may be loaded during a capture
    side.wait_stream(torch.cuda.current_stream(gpu))
    run = _Capture(w, like, gpu, driver.OwnStream(side.cuda_stream))
    calls, place = driver.library(), ctypes.c_void_p(side.cuda_stream)
    graph, exec = ctypes.c_void_p(), ctypes.c_void_p()
    draws = numbers(gpu) if w.draws else nullcontext()
    here, inside = torch.cuda.stream(side), torch.cuda.use_mem_pool(memory, gpu)

    def start(stream: int) -> None:
        if fresh is not None:
            fresh()
        driver.check(calls.cuGraphLaunch(exec, ctypes.c_void_p(stream)), "launching a CUDA graph")

    # Without a graph they return an error, which nobody needs.
    finalize(start, calls.cuGraphExecDestroy, exec).atexit = False
    finalize(start, calls.cuGraphDestroy, graph).atexit = False
    with torch.no_grad(), draws as fresh, here, inside:
        driver.check(calls.cuStreamBeginCapture_v2(place, THREAD_LOCAL), "starting a capture")
        try:
            run.all()
        finally:
            ended = calls.cuStreamEndCapture(place, ctypes.byref(graph))
        driver.check(ended, "ending a capture")
    torch.cuda.current_stream(gpu).wait_stream(side)
    driver.check(calls.cuGraphInstantiateWithFlags(ctypes.byref(exec), graph, 0), "making a graph")
    # Nothing else holds kept memory yet, so these are its reference counts when unused.
    counts = [t.untyped_storage()._cdata + 8 for t in run.results.values()]
    owners = [(at, ctypes.c_uint32.from_address(at).value) for at in counts]
    # Constants live with the plan; arguments are not ours.
    rest = run.nodes, run.uses, start, (memory, like.functions), fresh
    return Captured(exec.value or 0, run.results, owners, *rest)


@contextmanager
def numbers(gpu: int) -> Iterator[Callable[[], None]]:
    """A function that draws random numbers for the graph captured meanwhile.

    Captured kernels read the seed and the offset of torch's generator from its own memory. Torch
    writes them, and advances the generator, when it replays a graph that it has captured. So it
    captures one with a single node, which spans the same draws. During the capture, torch refuses
    draws in other threads.
    """
    graph, here = torch.cuda.CUDAGraph(), torch.cuda.stream(side_stream(gpu, -1)[0])
    generator = torch.cuda.default_generators[gpu]
    before = generator.clone_state()

    def fresh() -> None:
        with driver.capture_lock():
            graph.replay()

    try:
        with here:
            graph.capture_begin(capture_error_mode="thread_local")
            torch.cuda._sleep(0)  # type: ignore[no-untyped-call]  # a graph needs a node
        try:
            yield fresh
        finally:
            with here:
                graph.capture_end()
    except RuntimeError:
        generator.graphsafe_set_state(before)  # otherwise it stays in the capturing state
        raise


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
            (name, to.data_ptr() + at, start.data_ptr() + at, min(PIECE, size - at), moves)
            for name, to, start, moves in jobs
            for size in [whole_memory(to).nbytes]
            for at in range(0, size, PIECE)
        ]
        for k in range(0, len(pieces), PIECES):
            rows = pieces[k : k + PIECES]
            table = (ctypes.c_uint64 * (3 * PIECES))(*[x for p in rows for x in p[1:4]])
            params = node_params(copier(self.gpu), (BLOCKS, len(rows)), THREADS, 0, [table])
            launch(params, self.stream)
            for row, (name, to, start, _, moves) in enumerate(rows):
                origin = self.given[name].data_ptr()
                place, address = (3 * row + 1, start) if moves else (3 * row, to)
                self.uses.setdefault(name, []).append((len(self.nodes), place, address - origin))
            self.nodes.append(KernelNode(self.last(), params, table))

    def name(self, name: str, t: Tensor, source: str = "") -> None:
        """Name a tensor, and record it if it leaves the graph."""
        self.env[name] = t
        if source in self.origins:
            self.origins[name] = self.origins[source]
        if name in self.w.kept or name in self.w.writes:
            self.results[name] = t

    def memory(self, s: Alloc) -> Any:
        """New memory of the graph, or that of a result."""
        if s.name in self.w.writes and s.name not in self.w.copied:
            self.origins[s.name] = s.name
            return self.w.writes[s.name]
        return self.before[s.name] if s.name in self.before else super().memory(s)

    def call(self, s: CallStep) -> None:
        """Call an eager op, which may refuse to be captured."""
        try:
            super().call(s)
        except RuntimeError as e:
            raise CaptureError(s.op, str(e)) from e

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
        for k, a in enumerate(s.args):
            if origin := self.origins.get(a):
                use = len(self.nodes), k, given[k] - self.given[origin].data_ptr()
                self.uses.setdefault(origin, []).append(use)
        self.nodes.append(KernelNode(self.last(), params, values))
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
