"""State of the native code under construction: buffers, sizes, objects, the GIL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lenz.ir.dtype import DType
from lenz.ir.tensor import TensorType
from lenz.plan.native_text import Lines
from lenz.records import dataclass
from lenz.sym import Sym, Var

# The types of arguments, by their name in the code.
TYPES = {"type_tensor": torch.Tensor, "type_parameter": torch.nn.Parameter, "type_int": int}


class NotNative(Exception):
    """The plan has a step that only the Python function can run."""


@dataclass(frozen=True, slots=True)
class TorchLayout:
    """Offsets of the fields of torch and CPython that the code reads, and torch's exports.

    handle    bytes from the start of a Python tensor to its handle
    keys      bytes from the start of a tensor's implementation to its set of dispatch keys
    mask      the keys that are checked
    plain     their value in a plain strided tensor, by device type
    negative  the key of a tensor whose memory holds the negated values
    autograd  the keys that make autograd record a call
    bare      the keys of dense tensors without memory; those with memory have some of them
    schema    the schema of an op, by its name in plans; None for a function without one
    has       whether torch's library exports a function of this name
    """

    handle: int
    keys: int
    mask: int
    plain: Mapping[str, int]
    negative: int
    autograd: int
    bare: int
    schema: Callable[[str], Any]
    has: Callable[[str], bool]


@dataclass(slots=True)
class NativeBuffer:
    """A tensor: its slot number, and the name of its address once there is one.

    The slot holds a Python tensor (`is_object`) or a handle of libtorch. The tensor is `whole` if
    its first element is the first one of its memory. Its dtype may differ from the plan's if only
    kernels use it.
    """

    slot: int
    data: str = ""
    is_object: bool = False
    whole: bool = False
    dtype: DType | None = None


def kind_and_number(device: str) -> tuple[str, int]:
    """The type and number of a device; CPUs have the number -1. Raises NotNative for others."""
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda"):
        raise NotNative(f"tensors on {device}")
    return kind, int(number or 0) if kind == "cuda" else -1


class Frame:
    """The function under construction."""

    def __init__(self, layout: TorchLayout) -> None:
        self.layout = layout
        self.out = Lines()
        self.objects: dict[object, int] = {"slow": 0, "fail": 1}
        self.buffers: dict[str, NativeBuffer] = {}
        self.slots: dict[str, int] = {}  # of all buffers so far
        self.sizes: dict[Var, str] = {}
        self.types: dict[str, TensorType] = {}  # where the plan has them
        self.shims: list[str] = []
        self.step = 0  # the number of the current step
        self.values = 0  # most parameters of a GPU kernel
        self.released = False  # whether the GIL is released here

    def new(self, name: str, item: str = "") -> NativeBuffer:
        """A buffer of this name with its own slot, which takes ownership of the object `item`."""
        assert name not in self.slots
        self.slots[name] = len(self.slots)
        b = self.buffers[name] = NativeBuffer(self.slots[name], is_object=bool(item))
        if item:
            self.out.put(f"store ptr {item}, ptr {self.slot(b)}")
        return b

    def slot(self, b: NativeBuffer) -> str:
        """The address of a buffer's slot: among the objects, or among the handles."""
        return self.out.let(f"getelementptr ptr, ptr %{'o' if b.is_object else 'h'}, i64 {b.slot}")

    def object(self, what: object) -> str:
        """A Python object in `self`."""
        number = self.objects.setdefault(what, len(self.objects))
        return self.out.let(f"call ptr @PyTuple_GetItem(ptr %self, i64 {number})")

    def inside(self, item: str) -> str:
        """The handle inside a Python tensor."""
        return self.out.let(f"getelementptr i8, ptr {item}, i64 {self.layout.handle}")

    def handle(self, name: str) -> str:
        """The handle of a buffer."""
        b = self.buffers[name]
        found = self.out.let(f"load ptr, ptr {self.slot(b)}")
        return self.inside(found) if b.is_object else found

    def data(self, name: str) -> str:
        """The address of a buffer's first element."""
        b = self.buffers[name]
        if not b.data:
            b.data = self.out.let(f"call ptr @data(ptr {self.handle(name)})")
        return b.data

    def python(self, name: str) -> str:
        """A buffer as a Python tensor, which its slot owns."""
        b = self.buffers[name]
        if not b.is_object:
            self.hold()
            b.is_object = True
            self.out.put(f"call void @wrapped(ptr %h, ptr %o, i64 {b.slot})")
        return self.out.let(f"load ptr, ptr {self.slot(b)}")

    def drop(self, name: str) -> None:
        """Drop a buffer."""
        b = self.buffers.pop(name)
        if b.is_object:
            self.hold()
        told = "drop(ptr %o" if b.is_object else "delete(ptr %h"
        self.out.put(f"call void @{told}, i64 {b.slot})")

    def bind(self, var: Var, number: str) -> None:
        """Name the value of a size, and keep it for messages. It may be an argument twice."""
        if var not in self.sizes:
            at = self.out.let(f"getelementptr i64, ptr %n, i64 {len(self.sizes)}")
            self.out.put(f"store i64 {number}, ptr {at}")
            self.sizes[var] = number

    def number(self, s: Sym) -> str:
        """The value of a size."""
        return self.out.number(s, self.sizes)

    def layout_of(self, t: TensorType) -> str:
        """The rank, sizes and strides as three arguments."""
        sides = ([self.number(x) for x in s] for s in (t.shape, t.layout.stride))
        sizes, strides = map(self.out.array, sides)
        return f"i64 {len(t.shape)}, ptr {sizes}, ptr {strides}"

    def hold(self) -> None:
        """Take the GIL back."""
        if self.released:
            self.out.put("call void @hold(ptr %state)")
            self.released = False

    def release(self) -> None:
        """Let other threads run Python."""
        if not self.released:
            self.out.put("call void @release(ptr %state)")
            self.released = True

    def succeed(self, status: str, bits: int = 32) -> None:
        """Fail with a status if it is not 0."""
        wide = self.out.let(f"sext i{bits} {status} to i64") if bits < 64 else status
        self.out.put(f"store i64 {wide}, ptr %status")
        self.out.put(f"store i64 {self.step}, ptr %where")
        self.out.unless(f"icmp eq i64 {wide}, 0", "failed_free" if self.released else "failed")
