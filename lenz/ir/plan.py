"""The plan: everything that the runtime needs to run one graph, as a list of typed steps.

Readers of a plan decide nothing: `plan/python.py` prints it as a module, the report counts it. A
plan holds no `Graph` and no `Expr`; sizes are Syms over the sizes of the inputs.
Invariants: a name is defined (input, constant, Alloc, View, Call) before its first use and not used
after its Free; outputs are never freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from lenz.ir.graph import Atom, Draws, first_names, names_in
from lenz.ir.tensor import TensorType
from lenz.records import dataclass, field
from lenz.sym import Sym, Var

# A plan or a graph as a function: it takes the list of its arguments and empties it.
Boxed: TypeAlias = Callable[[list[Any]], Sequence[Any]]
# Who uses a new name for old memory: kernels only need its address, calls also see its dtype and
# sizes, and for autograd it is a view made by Python. A result alone in its memory is for calls.
Taker = Literal["kernels", "calls", "autograd"]


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor argument or constant; a call checks its sizes, strides, dtype and device.

    called    the user's name of an argument, for messages
    anywhere  its device is not checked, because only eager ops use it
    signed    its negative bit is checked, because kernels ignore that bit
    laid      with other strides, the negative bit or no memory it is copied, not rejected
    pinned    it keeps its address over calls: a parameter, or a saved tensor
    written   the plan writes into it
    content   the name of a constant's bytes; empty if the caller provides the constants
    """

    SYNTAX: ClassVar = (
        "{name:def} : {type:type}", "? called {called:string}", "? anywhere", "? signed",
        "? laid", "? pinned", "? written", "? content {content:string}",
    )  # fmt: skip
    name: str
    type: TensorType
    called: str = ""
    anywhere: bool = False
    signed: bool = False
    laid: bool = False
    pinned: bool = False
    written: bool = False
    content: str = ""


@dataclass(frozen=True, slots=True)
class SizeInput:
    """An integer argument: a Var that it binds, a multiple of one, or the required number.

    A Var may also be an object passed to calls.
    """

    SYNTAX: ClassVar = ("{value:sym} : size",)
    value: Sym


@dataclass(frozen=True, slots=True)
class BindSize:
    """Read a size from a tensor: its size (or stride) `dim` is factor * var."""

    SYNTAX: ClassVar = (
        "bind {var:size} = {stride:which}({source:use}, {dim:int})",
        "? by {factor:int}",
    )
    var: Var
    source: str
    dim: int
    stride: bool = False
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Alloc:
    """New memory of the type; `zero` asks for zeroed memory, `huge` for huge pages.

    If nothing else holds the argument `over`, it takes that argument's memory, which the next
    launch may overwrite.
    """

    SYNTAX: ClassVar = ("alloc {name:def} : {type:type}", "? zero", "? huge", "? over {over:over}")
    name: str
    type: TensorType
    zero: bool = False
    huge: bool = False
    over: str = ""


@dataclass(frozen=True, slots=True)
class Keep:
    """A new tensor in memory that the last CUDA graph wrote and keeps."""

    SYNTAX: ClassVar = ("keep {name:def}",)
    name: str


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name for the memory of `source`.

    It is the `same` tensor or a new one of this type. For autograd the new one is a view of the old
    one unless it is `detached`.
    """

    REST: ClassVar = ("? same", "? detached", "? for {taker:taker}")
    name: str
    source: str
    type: TensorType
    same: bool = False
    detached: bool = False
    taker: Taker = "calls"


@dataclass(frozen=True, slots=True)
class Reuse(Alias):
    """A name for the memory of a buffer that is dead from here on."""

    SYNTAX: ClassVar = ("reuse {name:def} : {type:type} of {source:take}", *Alias.REST)


@dataclass(frozen=True, slots=True)
class ViewStep(Alias):
    """Other sizes and strides over the memory of a buffer, from its first element."""

    SYNTAX: ClassVar = ("view {name:def} : {type:type} of {source:share}", *Alias.REST)


@dataclass(frozen=True, slots=True)
class Current:
    """Make a GPU current. The next launches go to its current stream.

    The first one holds from the start of the call. Afterwards the caller's GPU is current again.
    """

    SYNTAX: ClassVar = ("current {device:word}",)
    device: str


@dataclass(frozen=True, slots=True)
class LaunchStep:
    """Run a kernel: pointers of `args`, then the sizes.

    `grid` is the number of programs, on a machine that runs programs. `device` is "" for the CPU.
    A CUDA `graph` is launched with the addresses that may change.
    """

    SYNTAX: ClassVar = (
        "launch @{kernel:name}({args:use*}", "?; {sizes:sym*}", ")", "? on {device:word}",
        "? grid [{grid:sym}]", "? graph",
    )  # fmt: skip
    kernel: str
    args: tuple[str, ...]
    sizes: tuple[Sym, ...]
    grid: Sym | None = None
    device: str = ""
    graph: bool = False


@dataclass(frozen=True, slots=True)
class CallStep:
    """Call an eager op. `into` names allocated outputs for ops with an out= form.

    The number of results is checked (`counted`) if the op is not torch's own.
    An op that `holds` may use the memory of its arguments and results until a call `waits` for its
    results, or for good. Until then no other buffer reuses that memory, and nothing writes to it.
    `draws` is as in Extern. An op that `writes` may change its arguments, so these must be views
    for autograd too.
    """

    SYNTAX: ClassVar = (
        "call {outs:outs} = {op:word}({args:args}){single:single}", "? into", "? holds",
        "? waits ({waits:use*})", "? counted", "? draws {draws:draws}",
        "? writes",
    )  # fmt: skip
    op: str
    args: tuple[Atom, ...]
    kwargs: tuple[tuple[str, Atom], ...]
    outs: tuple[str | Sym | None, ...]
    single: bool
    into: bool = False
    holds: bool = False
    waits: tuple[str, ...] = ()
    counted: bool = False
    draws: Draws = ""
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Lay:
    """Copy a result of `op` if its strides are not those of its type.

    Kernels and views rely on the strides of fake tensors, which are right for most results. An
    `aligned` result is also copied if it does not start at a multiple of 16 bytes.
    """

    SYNTAX: ClassVar = ("lay {name:use} : {type:type} from {op:word}", "? aligned")
    name: str
    type: TensorType
    op: str
    aligned: bool = False


@dataclass(frozen=True, slots=True)
class Free:
    """Drop a reference to memory."""

    SYNTAX: ClassVar = ("free {name:end}",)
    name: str


@dataclass(frozen=True, slots=True)
class Check:
    """Raise if a check in the last kernel failed."""

    SYNTAX: ClassVar = ("check",)


NewName: TypeAlias = Alloc | Keep | Reuse | ViewStep  # of memory
Step: TypeAlias = BindSize | NewName | Current | LaunchStep | CallStep | Lay | Free | Check


RegionKind = Literal["graph", "outside"]


@dataclass(frozen=True, slots=True)
class Region:
    """Steps that a CUDA graph may replay as one, or a step outside graphs, with the reason.

    A reader without graphs runs them as ordinary steps.
    """

    SYNTAX: ClassVar = (
        "region {kind:region}", "? on {device:word}", "? because {why:string}", " {steps:steps}",
    )  # fmt: skip
    kind: RegionKind
    steps: tuple[Step, ...]
    why: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """One compiled graph. `kernels` are the names that LaunchSteps call, in order of first use.

    Kernels assume that the `aligned` arguments start at multiples of 16 bytes and that sizes are at
    most those of `most`. A call that breaks one of these assumptions, or whose size is not the
    multiple stated by an input, runs a fallback plan. If CUDA graphs are wanted, `results` are the
    types of the outputs (None for other values), and `saved` the positions of those that only the
    backward half reads. Comments are keyed by the index of steps in `flat`.
    """

    LINES: ClassVar = (
        "object {objects:name}+", "in {inputs:input}+", "const {constants:tensor}+",
        "?aligned ({aligned:use*})", "?most ({most:number*})",
        "?results ({results:maybe*})", "?saved ({saved:int*})", "{steps:step}+",
        "kernels ({kernels:symbol*})", "return ({outputs:atom*})",
    )  # fmt: skip
    name: str
    inputs: tuple[Input | SizeInput, ...]
    constants: tuple[Input, ...]
    steps: tuple[Step | Region, ...]
    outputs: tuple[Atom, ...]
    kernels: tuple[str, ...]
    objects: tuple[str, ...] = ()
    comments: tuple[tuple[int, str], ...] = field(default=(), compare=False)
    aligned: tuple[str, ...] = ()
    most: tuple[tuple[str, int], ...] = ()
    results: tuple[TensorType | None, ...] = ()
    saved: tuple[int, ...] = ()

    @property
    def flat(self) -> tuple[Step, ...]:
        """The steps, including those of regions."""
        return flat(self.steps)

    @property
    def tensors(self) -> dict[str, Input]:
        """The tensor arguments by name."""
        return {i.name: i for i in self.inputs if isinstance(i, Input)}

    @property
    def binds(self) -> list[BindSize]:
        """The steps that read sizes of arguments."""
        given = self.tensors
        return [s for s in self.flat if isinstance(s, BindSize) and s.source in given]


def place_of(plan: str, k: int, s: Step, why: str | None) -> str:
    """How an error names step `k` of a plan: its op or kernel, and the user's lines if known."""
    what = f"kernel {s.kernel}" if isinstance(s, LaunchStep) else getattr(s, "op", type(s).__name__)
    return ", ".join(filter(None, (f"{plan}, step {k}: {what}", why)))


def flat(steps: Iterable[Step | Region]) -> tuple[Step, ...]:
    """The steps, with each region replaced by its steps."""
    return tuple([x for s in steps for x in (s.steps if isinstance(s, Region) else (s,))])


def launched(steps: Iterable[Step | Region]) -> tuple[str, ...]:
    """Names of the kernels in order of first launch."""
    return tuple(dict.fromkeys(s.kernel for s in flat(steps) if isinstance(s, LaunchStep)))


def used(s: Step) -> tuple[str, ...]:
    """The buffers that a step uses."""
    match s:
        case Alias():
            return (s.source,)
        case LaunchStep():
            return s.args
        case CallStep():
            return names_in(s)
        case _:
            return ()


def defined(s: Step) -> tuple[str, ...]:
    """The buffers that a step defines."""
    match s:
        case Alloc() | Keep() | Alias():
            return (s.name,)
        case CallStep() if not s.into:
            return tuple(o for o in s.outs if isinstance(o, str))
        case _:
            return ()


def owners_of(steps: Iterable[Step]) -> dict[str, str]:
    """Each buffer in another's memory -> the first buffer of that memory."""
    return first_names((s.name, s.source) for s in steps if isinstance(s, Alias))
