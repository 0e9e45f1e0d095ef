"""C math functions of vectors, and operations that LLVM lowers badly."""

from __future__ import annotations

from collections.abc import Sequence

from lenz.ir.dtype import BOOL, F32, U32, U64, DType
from lenz.machine.cpu.llvm.function import Module
from lenz.machine.cpu.llvm.instructions import Instructions, Names
from lenz.machine.cpu.llvm.types import shuffle, suffix, value_type, vector
from lenz.target import Target

# Sleef's functions on vectors, with their greatest error in tenths of a unit in the last place. Its
# asinh and acosh are infinite from 1e154 on, its sinh and cosh from 709.8 on.
SLEEF = dict.fromkeys(
    ["acos", "asin", "atan", "atan2", "atanh", "cos", "erf", "exp", "exp2", "expm1", "lgamma",
     "log", "log10", "log1p", "log2", "pow", "sin", "tan", "tanh"], "u10",
)  # fmt: skip
SLEEF |= {"erfc": "u15", "hypot": "u05", "nextafter": ""}


def math(b: Instructions, name: str, dtype: DType, *xs: Names) -> Names:
    """The C math function of this name for the type, in every lane.

    Sleef has most of them for whole vectors. libtorch exports Sleef, and eager calls it. The
    definitions here are weak, so they only serve where libtorch exports none.
    """
    element, symbol = value_type(dtype), name + "f" * (dtype is F32)
    family, bits = _family(b.fn.module.target)
    if family and name in SLEEF:
        width = bits // (8 * dtype.bytes)
        full = f"Sleef_{name}{element[0]}{width}_{SLEEF[name]}{family}"
        callee = _lanewise(b.fn.module, f"weak {full}", symbol, element, len(xs), width)
        return tuple([_by_parts(b, callee, element, x, width) for x in zip(*xs, strict=True)])
    full = f"lanes.{symbol}.{suffix(element, b.lanes)}"
    callee = _lanewise(b.fn.module, f"internal {full}", symbol, element, len(xs), b.lanes)
    return call_lanes(b, callee, element, xs)


def _family(target: Target) -> tuple[str, int]:
    """Sleef's name of a processor's widest vectors, and their bits."""
    if target.triple.startswith(("aarch64", "arm64")):
        return "advsimd", 128
    if target.has("avx512f"):
        return "avx512f", 512
    return ("avx2", 256) if target.has("avx2") and target.has("fma") else ("", 0)


def _by_parts(b: Instructions, callee: str, element: str, xs: Sequence[str], width: int) -> str:
    """Apply a function of `width` lanes to vectors of b's lanes: twice as many, or no more."""
    if b.lanes <= width:
        whole = [_widened(b, element, x, width) for x in xs]
        return _first(b, element, _called(b, callee, element, whole, width), width)
    t, found = vector(element, b.lanes), []
    for half in (range(width), range(width, b.lanes)):
        parts = [b.fn.let(b.level, shuffle(t, x, "poison", half)) for x in xs]
        found.append(_called(b, callee, element, parts, width))
    low, high = found
    return b.fn.let(b.level, shuffle(vector(element, width), low, high, range(b.lanes)))


def call_lanes(b: Instructions, callee: str, element: str, xs: Sequence[Names]) -> Names:
    """The results of a function of lanes, for each copy."""
    return tuple([_called(b, callee, element, x, b.lanes) for x in zip(*xs, strict=True)])


def _called(b: Instructions, callee: str, element: str, xs: Sequence[str], lanes: int) -> str:
    t = vector(element, lanes)
    return b.fn.let(b.level, f"call {t} {callee}({', '.join([f'{t} {x}' for x in xs])})")


def _lanewise(module: Module, head: str, symbol: str, element: str, arity: int, lanes: int) -> str:
    """The name (with @) of a function on vectors that calls `symbol` on each lane."""
    callee = module.declare(symbol, element, *([element] * arity))
    if lanes == 1:
        return callee
    linkage, name = head.split()
    if name not in module.functions:
        t, before = vector(element, lanes), "poison"
        lines = list[str]()
        for i in range(lanes):
            lines += [f"  %x{k}.{i} = extractelement {t} %x{k}, i32 {i}" for k in range(arity)]
            args = ", ".join(f"{element} %x{k}.{i}" for k in range(arity))
            lines.append(f"  %y.{i} = call {element} {callee}({args})")
            lines.append(f"  %r.{i} = insertelement {t} {before}, {element} %y.{i}, i32 {i}")
            before = f"%r.{i}"
        params = ", ".join(f"{t} %x{k}" for k in range(arity))
        body = "\n".join([f"@{name}({params}) noinline #0 {{", *lines, f"  ret {t} {before}", "}"])
        module.functions[name] = f"define {linkage} {t} {body}"
    return f"@{name}"


def ldexp(b: Instructions, dtype: DType, x: Names, k: Names) -> Names:
    """x * 2^k for i32 exponents by vscalef of AVX512, which LLVM has only for vectors."""
    element = value_type(dtype)
    lanes = b.lanes if b.lanes > 1 else 16 // dtype.bytes
    v, i = vector(element, lanes), vector("i32", lanes)
    name = f"llvm.ldexp.{suffix(element, lanes)}.{suffix('i32', lanes)}"
    callee = b.fn.module.declare(name, v, v, i)
    return _on_whole(b, (element, "i32"), lanes, f"call {v} {callee}({v} {{}}, {i} {{}})", x, k)


def copysign(b: Instructions, dtype: DType, x: Names, y: Names) -> Names:
    """x with the sign of y, by their bits.

    LLVM's own may take the sign from a double, round that to half, and call a function that no JIT
    has (docs/upstream/llvm-22-copysign-half.ll).
    """
    bits = U32 if dtype is F32 else U64
    top = 1 << (8 * bits.bytes - 1)
    own, to = b.type(dtype), b.type(bits)

    def part(z: Names, mask: int) -> Names:
        return b.binary("and", bits, b.cast("bitcast", own, to, z), mask)

    return b.cast("bitcast", to, own, b.binary("or", bits, part(x, top - 1), part(y, top)))


def scalef(b: Instructions, _: DType, x: Names, k: Names) -> Names:
    """x * 2^k for f32 x and k by vscalefps of AVX-512, always in vectors of 16."""
    v = "<16 x float>"
    callee = b.fn.module.declare("llvm.x86.avx512.mask.scalef.ps.512", v, v, v, v, "i16", "i32")
    # All lanes, and the current rounding (4).
    text = f"call {v} {callee}({v} {{}}, {v} {{}}, {v} zeroinitializer, i16 -1, i32 4)"
    return _on_whole(b, ("float", "float"), 16, text, x, k)


def _on_whole(b: Instructions, kinds: Sequence[str], lanes: int, text: str, *xs: Names) -> Names:
    """The results of an instruction on vectors of `lanes` lanes, of which the first are b's."""
    out: list[str] = []
    for row in zip(*xs, strict=True):
        whole = [_widened(b, t, x, lanes) for t, x in zip(kinds, row, strict=True)]
        out.append(_first(b, kinds[0], b.fn.let(b.level, text.format(*whole)), lanes))
    return tuple(out)


def _widened(b: Instructions, element: str, name: str, width: int) -> str:
    """The lanes of a vector, then zeros."""
    if b.lanes == width:
        return name
    if b.lanes == 1:
        text = f"insertelement {vector(element, width)} zeroinitializer, {element} {name}, i32 0"
    else:
        lanes = [min(i, b.lanes) for i in range(width)]
        text = shuffle(vector(element, b.lanes), name, "zeroinitializer", lanes)
    return b.fn.let(b.level, text)


def _first(b: Instructions, element: str, name: str, width: int) -> str:
    """The first lanes of a vector of `width` lanes, as many as b has."""
    t = vector(element, width)
    if b.lanes == width:
        return name
    if b.lanes == 1:
        return b.fn.let(b.level, f"extractelement {t} {name}, i32 0")
    return b.fn.let(b.level, shuffle(t, name, "poison", range(b.lanes)))


def product_part(part: int, b: Instructions, _: DType, x: Names, y: Names) -> Names:
    """The lower (0) or the upper (1) words of the products of two vectors of u32.

    A vector is treated as half as many u64: even lanes by a mask, odd lanes by a shift, as vpmuludq
    multiplies. Both halves come from the same products.
    """
    if b.lanes == 1:
        product = b.binary("mul", U64, *[b.cast("zext", "i32", "i64", n) for n in (x, y)])
        if part:
            product = b.binary("lshr", U64, product, 32)
        return b.cast("trunc", "i64", "i32", product)
    n = b.lanes
    t = vector("i32", n)
    # The products are visible wherever the operands of these names are.
    found = b.fn.products.get((x, y))
    if found is None:
        found = b.fn.products[(x, y)] = _products(b, x, y)
    lanes = [k * n + 2 * i + part for i in range(n // 2) for k in (0, 1)]
    return b.fn.lets(b.level, (shuffle(t, p, q, lanes) for p, q in zip(*found, strict=True)))


def _products(b: Instructions, x: Names, y: Names) -> tuple[Names, Names]:
    """The products of the even and of the odd lanes, each as a vector of the lane type."""
    t, d = vector("i32", b.lanes), f"<{b.lanes // 2} x i64>"
    low = ("splat (i64 4294967295)",) * b.copies
    up = ("splat (i64 32)",) * b.copies
    pairs = [b.cast("bitcast", t, d, names) for names in (x, y)]
    even = b.each(f"mul {d}", *[b.each(f"and {d}", p, low) for p in pairs])
    odd = b.each(f"mul {d}", *[b.each(f"lshr {d}", p, up) for p in pairs])
    return b.cast("bitcast", d, t, even), b.cast("bitcast", d, t, odd)


def divide(b: Instructions, opcode: str, dtype: DType, x: Names, y: Names) -> Names:
    """sdiv, udiv, srem or urem without traps; vectors of up to 32 bits go through f64, exactly.

    x86 faults on division by zero and on MIN / -1, and masked-off lanes may hold anything. So a
    divisor that would fault is replaced: a quotient by zero is then some value, and MIN / -1 wraps.
    """
    signed = opcode[0] == "s"
    unsure = [n for n in y if n[0] == "%" or n.rstrip(")").split()[-1] in ("0", "zeroinitializer")]
    if not unsure and not (signed and any("-1" in n for n in y)):
        return b.each(f"{opcode} {b.type(dtype)}", x, y)
    one, zero = b.constant(dtype, 1), b.constant(dtype, 0)
    bad = b.compare("icmp eq", dtype, y, zero)
    negate = b.compare("icmp eq", dtype, y, -1) if signed else bad
    if signed:
        bad = b.binary("or", BOOL, bad, negate)
    safe = b.select(bad, dtype, one, y)
    if b.lanes > 1 and dtype.bits <= 32:
        result = _by_double(b, opcode, dtype, x, safe)
    else:
        result = b.each(f"{opcode} {b.type(dtype)}", x, safe)
    if opcode == "sdiv":
        result = b.select(negate, dtype, b.binary("sub", dtype, zero, x), result)
    return result


def _by_double(b: Instructions, opcode: str, dtype: DType, x: Names, y: Names) -> Names:
    # |a| < 2^32 and b are exact in f64. The rounding error of a/b is at most a/b * 2^-53, less than
    # 1/b, the distance of a non-integer quotient from the next integer.
    signed = opcode[0] == "s"
    t, d = b.type(dtype), vector("double", b.lanes)
    wide = vector("i32" if signed else "i64", b.lanes)
    a = b.cast("sitofp" if signed else "uitofp", t, d, x)
    c = b.cast("sitofp" if signed else "uitofp", t, d, y)
    # The greatest quotient of u32 needs 33 bits as a signed integer, hence i64 there.
    whole = b.cast("fptosi", d, wide, b.each(f"fdiv {d}", a, c))
    if wide != t:
        whole = b.cast("trunc", wide, t, whole)
    if opcode[1:] == "div":
        return whole
    return b.binary("sub", dtype, x, b.binary("mul", dtype, whole, y))
