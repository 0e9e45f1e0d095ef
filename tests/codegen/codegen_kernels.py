"""Small constructors of kernels for the tests."""

from __future__ import annotations

from collections.abc import Callable

from lenz.ir.dtype import F32, I64, DType
from lenz.ir.expr import Expr, load
from lenz.ir.kernel import For, Kernel, Param, Reduce, Store, TileConfig
from lenz.ir.tensor import axis
from lenz.sym import Sym, Var, ceildiv, minimum, sym

Map = Callable[..., Expr]
PLAIN = TileConfig()


def at(name: str, offset: Sym | int, dtype: DType = F32) -> Expr:
    """An element of a buffer by flat offset."""
    return load(name, (sym(offset),), dtype)


def pointwise(
    f: Map,
    n: Sym | int,
    ins: tuple[DType, ...],
    out: DType,
    block: int = 4096,
    tile: TileConfig = PLAIN,
    sizes: tuple[Var, ...] = (),
) -> Kernel:
    """out[i] = f(a[i], b[i], ...) over n elements, in parallel blocks."""
    n = sym(n)
    b = axis("b", ceildiv(n, block))
    v = axis("v", minimum(block, n - block * b.var))
    i = block * b.var + v.var
    names = "abcdefgh"[: len(ins)]
    params = [Param(x, d, n, "in") for x, d in zip(names, ins, strict=True)]
    value = f(*[at(x, i, d) for x, d in zip(names, ins, strict=True)])
    body = For(b, "parallel", (For(v, "vector", (Store("out", i, value),)),))
    return Kernel(
        "pointwise_0",
        "pointwise",
        (*params, Param("out", out, n, "out")),
        sizes,
        (body,),
        tile=tile,
    )


def row_reduction(
    kind: str,
    m: Sym | int,
    n: Sym | int,
    dtype: DType = F32,
    f: Map = lambda x: x,
    result: DType | None = None,
    unroll: int = 4,
    sizes: tuple[Var, ...] = (),
) -> Kernel:
    """out[i] = reduce f(a[i, j]) over j."""
    from lenz.ir.expr import ref

    m, n = sym(m), sym(n)
    i, r = axis("i", m), axis("r", n)
    value = f(at("a", n * i.var + r.var, dtype))
    out = I64 if kind.startswith("arg") else value.dtype
    body = For(
        i,
        "parallel",
        (
            For(r, "vector", (Reduce("s", kind, value, (r.var,)),)),  # type: ignore[arg-type]
            Store("out", i.var, ref("s", out)),
        ),
    )
    params = (Param("a", dtype, m * n, "in"), Param("out", result or out, m, "out"))
    return Kernel("row_0", "reduction", params, sizes, (body,), tile=TileConfig(1, unroll, 4))
