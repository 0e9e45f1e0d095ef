"""What the native code of a plan has while it is written: buffers, sizes, objects, the GIL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lenz.plan.native_text import Lines
from lenz.sym import Sym, Var


class Refused(Exception):
    """The plan has a step that only the Python function runs."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where torch and CPython keep what the code reads itself.

    handle    bytes from the start of a Python tensor to its handle
    keys      bytes from the start of a tensor's implementation to its set of dispatch keys
    mask      the keys that are looked at
    plain     what they are in a tensor on a CPU whose memory is as its strides say
    negative  the key of a tensor whose memory holds the negative
    types     the addresses of `torch.Tensor` and `torch.nn.Parameter`
    integer   the address of `int`
    """

    handle: int
    keys: int
    mask: int
    plain: int
    negative: int
    types: tuple[int, int]
    integer: int


@dataclass(slots=True)
class Buffer:
    """A tensor: the number of its slot, and the name of its address once it has one.

    The slot holds a Python tensor (`is_object`) or a handle of libtorch's.
    """

    slot: int
    data: str = ""
    is_object: bool = False


class Frame:
    """The function while it is written."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.out = Lines()
        self.objects: dict[object, int] = {"slow": 0, "raise_failed": 1, "raise_error": 2}
        self.buffers: dict[str, Buffer] = {}
        self.sizes: dict[Var, str] = {}
        self.released = False  # other threads may run Python here

    def new(self, name: str, item: str = "") -> Buffer:
        """A buffer of this name, with a slot of its own, which takes over the object `item`."""
        b = self.buffers[name] = Buffer(self.out.slots, is_object=bool(item))
        self.out.slots += 1
        if item:
            self.out.put(f"store ptr {item}, ptr {self.slot(b)}")
        return b

    def slot(self, b: Buffer) -> str:
        """The address of a buffer's slot: among the objects, or among the handles."""
        return self.out.let(f"getelementptr ptr, ptr %{'o' if b.is_object else 'h'}, i64 {b.slot}")

    def object(self, what: object) -> str:
        """A Python object that `self` holds."""
        place = self.objects.setdefault(what, len(self.objects))
        return self.out.let(f"call ptr @PyTuple_GetItem(ptr %self, i64 {place})")

    def inside(self, item: str) -> str:
        """The handle inside of a Python tensor."""
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
            handles = self.slot(b)
            b.is_object = True
            self.out.put(f"call void @wrapped(ptr {handles}, ptr {self.slot(b)})")
        return self.out.let(f"load ptr, ptr {self.slot(b)}")

    def share(self, source: str, name: str) -> None:
        """One tensor under two names, each of which is dropped."""
        b = self.buffers[source]
        found = self.out.let(f"load ptr, ptr {self.slot(b)}")
        if b.is_object:
            self.hold()
            self.out.put(f"call void @Py_IncRef(ptr {found})")
            self.new(name, found).data = b.data
        else:
            slot = self.slot(self.new(name))
            self.buffers[name].data = b.data
            self.out.put(f"call i32 @aoti_torch_new_tensor_handle(ptr {found}, ptr {slot})")

    def drop(self, name: str) -> None:
        """Drop a buffer."""
        b = self.buffers.pop(name)
        if b.is_object:
            self.hold()
        self.out.put(f"call void @{'drop' if b.is_object else 'delete'}(ptr {self.slot(b)})")

    def number(self, s: Sym) -> str:
        """The value of a size."""
        return self.out.number(s, self.sizes)

    def layout_of(self, shape: Sequence[Sym], stride: Sequence[Sym]) -> str:
        """The rank, sizes and strides as three arguments."""
        sizes, strides = (self.out.array([self.number(x) for x in s]) for s in (shape, stride))
        return f"i64 {len(shape)}, ptr {sizes}, ptr {strides}"

    def hold(self) -> None:
        """Take the GIL back."""
        if self.released:
            thread = self.out.let("load ptr, ptr %state")
            self.out.put(f"call void @PyEval_RestoreThread(ptr {thread})")
            self.released = False

    def release(self) -> None:
        """Let other threads run Python."""
        if not self.released:
            self.out.put(f"store ptr {self.out.let('call ptr @PyEval_SaveThread()')}, ptr %state")
            self.released = True

    def require(self, test: str, failed: str) -> None:
        """Leave with an error unless the test holds."""
        self.out.unless(test, f"{failed}_free" if self.released else failed)
