"""The LLVM text of a plan's function under construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lenz.sym import Add, FloorDiv, Int, Max, Min, Mod, Mul, Sym, Var
from lenz.sym.expr import factors, linear

# The codes of c10::ScalarType, which torch never changes: model files hold them.
CODES: Mapping[str, int] = {
    "u8": 0, "i8": 1, "i16": 2, "i32": 3, "i64": 4, "f16": 5, "f32": 6, "f64": 7, "c32": 8,
    "c64": 9, "c128": 10, "bool": 11, "bf16": 15, "f8e5m2": 23, "f8e4m3fn": 24, "f8e5m2fnuz": 25,
    "f8e4m3fnuz": 26, "u16": 27, "u32": 28, "u64": 29,
}  # fmt: skip

ENDS = """
slow:
  %slow_object = call ptr @PyTuple_GetItem(ptr %self, i64 0)
  %slow_result = call ptr @PyObject_CallOneArg(ptr %slow_object, ptr %args)
  ret ptr %slow_result
failed_free:
  call void @hold(ptr %state)
  br label %failed
failed:
  %fail = call ptr @PyTuple_GetItem(ptr %self, i64 1)
  %step = load i64, ptr %where
  %code = load i64, ptr %status
  call void @failed(ptr %fail, i64 %step, i64 %code, ptr %h, ptr %o, i64 SLOTS, ptr %n, i64 SIZES)
  LEAVE
  ret ptr null
raised:
  call void @clean(ptr %h, ptr %o, i64 SLOTS)
  LEAVE
  ret ptr null
"""


class Lines:
    """The lines of the function, its constants and declarations."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.globals: list[str] = []
        self.scratch: list[str] = []  # allocations of the entry block
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
        """Jump to a block unless a test holds.

        The test is an instruction with a bool. LLVM's fast selection compiles no comparison of
        bools: one costs as much as ten other instructions.
        """
        held, after = self.let(test), self.label()
        self.put(f"br i1 {held}, label %{after}, label %{target}")
        self.lines.append(f"{after}:")

    def branch(self, held: str, target: str) -> None:
        """Jump to a block if a bool is true, else continue in a new one."""
        other = self.label()
        self.put(f"br i1 {held}, label %{target}, label %{other}")
        self.lines.append(f"{other}:")

    def join(self, target: str) -> None:
        """Continue in a block."""
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
        raise TypeError(f"{s!r} is not a size")

    def array(self, items: Sequence[str], type: str = "i64") -> str:
        """The address of an array of numbers or pointers."""
        if not items:
            return "null"
        kind, key = f"[{len(items)} x {type}]", (type, *items)
        if all(x[0] != "%" for x in items):
            if key not in self._arrays:
                self._arrays[key] = f"@n{len(self.globals)}"
                inner = ", ".join(f"{type} {x}" for x in items)
                self.globals.append(f"{self._arrays[key]} = internal constant {kind} [{inner}]")
            return self._arrays[key]
        name = self.cell(kind)
        for k, x in enumerate(items):
            at = self.let(f"getelementptr {type}, ptr {name}, i64 {k}")
            self.put(f"store {type} {x}, ptr {at}")
        return name

    def cell(self, kind: str = "i64") -> str:
        """The address of new memory for an integer, or for a value of another type."""
        name = f"%a{len(self.scratch)}"
        self.scratch.append(f"  {name} = alloca {kind}")
        return name

    def declare(self, name: str, line: str) -> None:
        """Declare an external symbol, once."""
        if name not in self._declared:
            self._declared[name] = None
            self.globals.append(line)

    def function(self, slots: int, sizes: int, values: int, leave: str) -> str:
        """The text of the function.

        It has `slots` for tensors and `sizes`, at most `values` parameters per launch, and ends
        with the instruction `leave` on failure.
        """
        kind = f"[{max(slots, 1)} x ptr]"
        head = [
            "define ptr @call(ptr %self, ptr %args) {",
            f"  %h = alloca {kind}",
            f"  %o = alloca {kind}",
            f"  %n = alloca [{max(sizes, 1)} x i64]",
            f"  %values = alloca [{max(values, 1)} x i64]",
            "  %state = alloca ptr",
            "  %where = alloca i64",
            "  %status = alloca i64",
            "  %guard = alloca [16 x i8], align 8",
            *self.scratch,
            f"  call void @clear(ptr %h, i64 {slots})",
            f"  call void @clear(ptr %o, i64 {slots})",
        ]
        ends = ENDS.replace("SLOTS", str(slots)).replace("SIZES", str(sizes)).strip("\n")
        return "\n".join([*head, *self.lines, ends.replace("LEAVE", leave), "}"])
