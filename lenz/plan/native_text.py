"""LLVM's text of a plan's function while it is written, and the helpers that it calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lenz.sym import Add, FloorDiv, Int, Max, Min, Mod, Mul, Sym, Var
from lenz.sym.expr import factors, linear

# The codes of c10::ScalarType, which torch never changes: they are in files of models.
CODES: Mapping[str, int] = {
    "u8": 0, "i8": 1, "i16": 2, "i32": 3, "i64": 4, "f16": 5, "f32": 6, "f64": 7, "c64": 9,
    "c128": 10, "bool": 11, "bf16": 15, "f8e5m2": 23, "f8e4m3fn": 24, "u16": 27, "u32": 28,
    "u64": 29,
}  # fmt: skip
HUGE = 1 << 21  # bytes of a huge page

# What the code calls: its result and arguments in LLVM's text.
IMPORTS: Mapping[str, str] = {
    "aoti_torch_delete_tensor_object": "i32 (ptr)",
    "aoti_torch_empty_strided": "i32 (i64, ptr, ptr, i32, i32, i32, ptr)",
    "aoti_torch_get_data_ptr": "i32 (ptr, ptr)",
    "aoti_torch_get_dim": "i32 (ptr, ptr)",
    "aoti_torch_get_dtype": "i32 (ptr, ptr)",
    "aoti_torch_get_sizes": "i32 (ptr, ptr)",
    "aoti_torch_get_storage_offset": "i32 (ptr, ptr)",
    "aoti_torch_get_storage_size": "i32 (ptr, ptr)",
    "aoti_torch_get_strides": "i32 (ptr, ptr)",
    "aoti_torch_new_tensor_handle": "i32 (ptr, ptr)",
    "aoti_torch_zero_": "i32 (ptr)",
    "aoti_torch__reinterpret_tensor": "i32 (ptr, i64, ptr, ptr, i64, ptr)",
    "_Z16THPVariable_WrapRKN2at10TensorBaseE": "ptr (ptr)",
    "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv": "i64 ()",
    "madvise": "i32 (ptr, i64, i32)",
    "PyEval_RestoreThread": "void (ptr)",
    "PyEval_SaveThread": "ptr ()",
    "PyList_GetItem": "ptr (ptr, i64)",
    "PyList_New": "ptr (i64)",
    "PyList_SetItem": "i32 (ptr, i64, ptr)",
    "PyList_SetSlice": "i32 (ptr, i64, i64, ptr)",
    "PyList_Size": "i64 (ptr)",
    "PyLong_AsLongLong": "i64 (ptr)",
    "PyLong_FromLongLong": "ptr (i64)",
    "PyObject_CallNoArgs": "ptr (ptr)",
    "PyObject_CallOneArg": "ptr (ptr, ptr)",
    "PyObject_Vectorcall": "ptr (ptr, ptr, i64, ptr)",
    "PySequence_GetItem": "ptr (ptr, i64)",
    "PyTuple_GetItem": "ptr (ptr, i64)",
    "PyTuple_New": "ptr (i64)",
    "PyTuple_SetItem": "i32 (ptr, i64, ptr)",
    "Py_DecRef": "void (ptr)",
    "Py_IncRef": "void (ptr)",
}


def _declared(name: str, kind: str) -> str:
    result, _, arguments = kind.partition(" ")
    return f"declare {result} @{name}{arguments}"


def _reader(name: str, call: str, type: str) -> str:
    """A function that gives what a call of the shim writes."""
    return f"""
define internal {type} @{name}(ptr %handle) {{
  %at = alloca {type}
  store {type} {"null" if type == "ptr" else "-1"}, ptr %at
  call i32 @{call}(ptr %handle, ptr %at)
  %value = load {type}, ptr %at
  ret {type} %value
}}
"""


HELPERS = (
    "\n".join(_declared(*pair) for pair in IMPORTS.items())
    + _reader("data", "aoti_torch_get_data_ptr", "ptr")
    + _reader("dim_of", "aoti_torch_get_dim", "i64")
    + _reader("dtype_of", "aoti_torch_get_dtype", "i32")
    + _reader("sizes_of", "aoti_torch_get_sizes", "ptr")
    + _reader("strides_of", "aoti_torch_get_strides", "ptr")
    + _reader("offset_of", "aoti_torch_get_storage_offset", "i64")
    + _reader("bytes_of", "aoti_torch_get_storage_size", "i64")
    + """
define internal ptr @item(ptr %list, i64 %k, i64 %n) {
  %size = call i64 @PyList_Size(ptr %list)
  %fits = icmp eq i64 %size, %n
  br i1 %fits, label %take, label %none
take:
  %item = call ptr @PyList_GetItem(ptr %list, i64 %k)
  ret ptr %item
none:
  ret ptr null
}

define internal i1 @is_either(ptr %object, i64 %a, i64 %b) {
  %at = getelementptr i8, ptr %object, i64 8
  %type = load i64, ptr %at
  %is_a = icmp eq i64 %type, %a
  %is_b = icmp eq i64 %type, %b
  %is = or i1 %is_a, %is_b
  ret i1 %is
}

define internal i1 @is_plain(ptr %handle, i64 %keys, i64 %mask, i64 %plain) {
  %implementation = load ptr, ptr %handle
  %at = getelementptr i8, ptr %implementation, i64 %keys
  %all = load i64, ptr %at
  %some = and i64 %all, %mask
  %is = icmp eq i64 %some, %plain
  ret i1 %is
}

define internal i64 @read_sizes(ptr %handle, i64 %dim) {
  %sizes = call ptr @sizes_of(ptr %handle)
  %at = getelementptr i64, ptr %sizes, i64 %dim
  %size = load i64, ptr %at
  ret i64 %size
}

define internal i64 @read_strides(ptr %handle, i64 %dim) {
  %strides = call ptr @strides_of(ptr %handle)
  %at = getelementptr i64, ptr %strides, i64 %dim
  %stride = load i64, ptr %at
  ret i64 %stride
}

define internal i1 @fits(ptr %handle, i32 %dtype, i64 %rank, ptr %sizes, ptr %strides) {
  %code = call i32 @dtype_of(ptr %handle)
  %dim = call i64 @dim_of(ptr %handle)
  %same_code = icmp eq i32 %code, %dtype
  %same_dim = icmp eq i64 %dim, %rank
  %same = and i1 %same_code, %same_dim
  br i1 %same, label %begin, label %differs
begin:
  %own_sizes = call ptr @sizes_of(ptr %handle)
  %own_strides = call ptr @strides_of(ptr %handle)
  br label %next
next:
  %k = phi i64 [ 0, %begin ], [ %after, %good ]
  %more = icmp slt i64 %k, %rank
  br i1 %more, label %look, label %fit
look:
  %size_at = getelementptr i64, ptr %own_sizes, i64 %k
  %size = load i64, ptr %size_at
  %wanted_at = getelementptr i64, ptr %sizes, i64 %k
  %wanted = load i64, ptr %wanted_at
  %same_size = icmp eq i64 %size, %wanted
  br i1 %same_size, label %step, label %differs
step:
  %stride_at = getelementptr i64, ptr %own_strides, i64 %k
  %stride = load i64, ptr %stride_at
  %told_at = getelementptr i64, ptr %strides, i64 %k
  %told = load i64, ptr %told_at
  %same_stride = icmp eq i64 %stride, %told
  %short = icmp sle i64 %size, 1
  %either = or i1 %same_stride, %short
  br i1 %either, label %good, label %differs
good:
  %after = add i64 %k, 1
  br label %next
fit:
  ret i1 true
differs:
  ret i1 false
}

define internal i1 @is_laid(ptr %object, i64 %a, i64 %b, i64 %behind, i64 %keys, i64 %mask,
    i64 %plain, i32 %dtype, i64 %rank, ptr %sizes, ptr %strides) {
  %is_tensor = call i1 @is_either(ptr %object, i64 %a, i64 %b)
  br i1 %is_tensor, label %look, label %no
look:
  %handle = getelementptr i8, ptr %object, i64 %behind
  %is_plain = call i1 @is_plain(ptr %handle, i64 %keys, i64 %mask, i64 %plain)
  br i1 %is_plain, label %compare, label %no
compare:
  %fits = call i1 @fits(ptr %handle, i32 %dtype, i64 %rank, ptr %sizes, ptr %strides)
  ret i1 %fits
no:
  ret i1 false
}

define internal ptr @empty(ptr %slot, i64 %rank, ptr %sizes, ptr %strides, i32 %dtype, i1 %huge,
    i1 %zero) {
  %failed = call i32 @aoti_torch_empty_strided(i64 %rank, ptr %sizes, ptr %strides, i32 %dtype,
    i32 0, i32 -1, ptr %slot)
  %handle = load ptr, ptr %slot
  %is_none = icmp eq ptr %handle, null
  br i1 %is_none, label %none, label %made
made:
  %data = call ptr @data(ptr %handle)
  br i1 %huge, label %measure, label %clear
measure:
  %bytes = call i64 @bytes_of(ptr %handle)
  %start = ptrtoint ptr %data to i64
  %raised = add i64 %start, HUGE_LESS_1
  %first = and i64 %raised, -HUGE_BYTES
  %end = add i64 %start, %bytes
  %last = and i64 %end, -HUGE_BYTES
  %length = sub i64 %last, %first
  %enough = icmp sgt i64 %length, 0
  %large = icmp sge i64 %bytes, HUGE_TWICE
  %advise = and i1 %enough, %large
  br i1 %advise, label %ask, label %clear
ask:
  %from = inttoptr i64 %first to ptr
  call i32 @madvise(ptr %from, i64 %length, i32 14)
  br label %clear
clear:
  br i1 %zero, label %fill, label %done
fill:
  call i32 @aoti_torch_zero_(ptr %handle)
  br label %done
done:
  ret ptr %data
none:
  ret ptr null
}

define internal void @delete(ptr %slot) {
  %handle = load ptr, ptr %slot
  store ptr null, ptr %slot
  %is_none = icmp eq ptr %handle, null
  br i1 %is_none, label %done, label %some
some:
  call i32 @aoti_torch_delete_tensor_object(ptr %handle)
  br label %done
done:
  ret void
}

define internal void @drop(ptr %slot) {
  %object = load ptr, ptr %slot
  store ptr null, ptr %slot
  call void @Py_DecRef(ptr %object)
  ret void
}

define internal void @wrapped(ptr %from, ptr %to) {
  %handle = load ptr, ptr %from
  %object = call ptr @_Z16THPVariable_WrapRKN2at10TensorBaseE(ptr %handle)
  store ptr %object, ptr %to
  call void @delete(ptr %from)
  ret void
}

define internal void @clean(ptr %handles, ptr %objects, i64 %count) {
  br label %next
next:
  %k = phi i64 [ 0, %0 ], [ %after, %more ]
  %left = icmp slt i64 %k, %count
  br i1 %left, label %more, label %done
more:
  %handle = getelementptr ptr, ptr %handles, i64 %k
  call void @delete(ptr %handle)
  %object = getelementptr ptr, ptr %objects, i64 %k
  call void @drop(ptr %object)
  %after = add i64 %k, 1
  br label %next
done:
  ret void
}

define internal i64 @floor_div(i64 %a, i64 %b) {
  %quotient = sdiv i64 %a, %b
  %rest = srem i64 %a, %b
  %sign = xor i64 %rest, %b
  %opposite = icmp slt i64 %sign, 0
  %some = icmp ne i64 %rest, 0
  %lower = and i1 %opposite, %some
  %less = sext i1 %lower to i64
  %result = add i64 %quotient, %less
  ret i64 %result
}
""".replace("HUGE_LESS_1", str(HUGE - 1))
    .replace("HUGE_BYTES", str(HUGE))
    .replace("HUGE_TWICE", str(2 * HUGE))
)

ENDS = """
slow:
  %slow_object = call ptr @PyTuple_GetItem(ptr %self, i64 0)
  %slow_result = call ptr @PyObject_CallOneArg(ptr %slow_object, ptr %args)
  ret ptr %slow_result
check_free:
  %check_thread = load ptr, ptr %state
  call void @PyEval_RestoreThread(ptr %check_thread)
  br label %check
check:
  call void @clean(ptr %h, ptr %o, i64 COUNT)
  %check_code = load i64, ptr %failed
  %check_number = call ptr @PyLong_FromLongLong(i64 %check_code)
  %check_raise = call ptr @PyTuple_GetItem(ptr %self, i64 1)
  %check_none = call ptr @PyObject_CallOneArg(ptr %check_raise, ptr %check_number)
  call void @Py_DecRef(ptr %check_number)
  ret ptr null
error_free:
  %error_thread = load ptr, ptr %state
  call void @PyEval_RestoreThread(ptr %error_thread)
  br label %error
error:
  call void @clean(ptr %h, ptr %o, i64 COUNT)
  %error_raise = call ptr @PyTuple_GetItem(ptr %self, i64 2)
  %error_none = call ptr @PyObject_CallNoArgs(ptr %error_raise)
  ret ptr null
raised:
  call void @clean(ptr %h, ptr %o, i64 COUNT)
  ret ptr null
"""


class Lines:
    """The lines of the function, its constants, and what it declares."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.globals: list[str] = []
        self.scratch: list[str] = []  # what the entry block reserves
        self.slots = 0
        self._count = 0
        self._arrays: dict[tuple[str, ...], str] = {}
        self._sizes: dict[Sym, str] = {}
        self._declared: dict[str, None] = {}

    def put(self, line: str) -> None:
        """Append an instruction."""
        self.lines.append(f"  {line}")

    def let(self, text: str) -> str:
        """Append an instruction with a result, and name it."""
        self._count += 1
        self.put(f"%t{self._count} = {text}")
        return f"%t{self._count}"

    def label(self) -> str:
        """The name of a new block."""
        self._count += 1
        return f"b{self._count}"

    def unless(self, test: str, target: str) -> None:
        """Go to a block unless a test holds."""
        held, after = self.let(test), self.label()
        self.put(f"br i1 {held}, label %{after}, label %{target}")
        self.lines.append(f"{after}:")

    def branch(self, held: str, target: str) -> None:
        """Go to a block if a bool is true, and on in a new one if not."""
        other = self.label()
        self.put(f"br i1 {held}, label %{target}, label %{other}")
        self.lines.append(f"{other}:")

    def join(self, target: str) -> None:
        """Go on in a block."""
        self.put(f"br label %{target}")
        self.lines.append(f"{target}:")

    def number(self, s: Sym, sizes: Mapping[Var, str]) -> str:
        """The value of a size."""
        if isinstance(s, Int):
            return str(s.value)
        if isinstance(s, Var):
            return sizes[s]
        if s not in self._sizes:
            self._sizes[s] = self._computed(s, sizes)
        return self._sizes[s]

    def _computed(self, s: Sym, sizes: Mapping[Var, str]) -> str:
        match s:
            case Add():
                const, terms = linear(s)
                total = str(const)
                for term, times in terms:
                    part = self.let(f"mul i64 {self.number(term, sizes)}, {times}")
                    total = self.let(f"add i64 {total}, {part}")
                return total
            case Mul():
                total = "1"
                for factor in factors(s):
                    total = self.let(f"mul i64 {total}, {self.number(factor, sizes)}")
                return total
            case FloorDiv() | Mod():
                a, b = self.number(s.num, sizes), self.number(s.den, sizes)
                whole = self.let(f"call i64 @floor_div(i64 {a}, i64 {b})")
                if isinstance(s, FloorDiv):
                    return whole
                return self.let(f"sub i64 {a}, {self.let(f'mul i64 {whole}, {b}')}")
            case Min() | Max():
                first, *others = [self.number(x, sizes) for x in s.args]
                for x in others:
                    kind = "slt" if isinstance(s, Min) else "sgt"
                    held = self.let(f"icmp {kind} i64 {first}, {x}")
                    first = self.let(f"select i1 {held}, i64 {first}, i64 {x}")
                return first
        raise TypeError(f"{s!r} is no size")

    def array(self, items: Sequence[str], type: str = "i64") -> str:
        """The address of numbers or pointers that lie one behind the other."""
        if not items:
            return "null"
        key = tuple(items)
        if key in self._arrays:
            return self._arrays[key]
        kind = f"[{len(items)} x {type}]"
        if all(x[0] != "%" for x in items):
            name = f"@n{len(self.globals)}"
            inner = ", ".join(f"{type} {x}" for x in items)
            self.globals.append(f"{name} = internal constant {kind} [{inner}]")
            self._arrays[key] = name
            return name
        name = f"%a{len(self.scratch)}"
        self.scratch.append(f"  {name} = alloca {kind}")
        for k, x in enumerate(items):
            at = self.let(f"getelementptr {type}, ptr {name}, i64 {k}")
            self.put(f"store {type} {x}, ptr {at}")
        return name

    def declare(self, kernel: str, pointers: int, sizes: int) -> None:
        """Declare a kernel."""
        if kernel not in self._declared:
            self._declared[kernel] = None
            kinds = ", ".join(["ptr"] * pointers + ["i64"] * sizes)
            self.globals.append(f'declare i64 @"{kernel}"({kinds})')

    def function(self) -> str:
        """The text of the function."""
        slots = f"[{max(self.slots, 1)} x ptr]"
        head = [
            "define ptr @call(ptr %self, ptr %args) {",
            f"  %h = alloca {slots}",
            f"  %o = alloca {slots}",
            "  %state = alloca ptr",
            "  %failed = alloca i64",
            *self.scratch,
            f"  store {slots} zeroinitializer, ptr %h",
            f"  store {slots} zeroinitializer, ptr %o",
        ]
        ends = ENDS.replace("COUNT", str(self.slots)).strip("\n")
        return "\n".join([*head, *self.lines, ends, "}"])
