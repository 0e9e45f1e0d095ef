"""The interface of lenz.sym: interning, texts, bounds, proofs, environments, errors."""

from __future__ import annotations

import copy

import pytest

from lenz.ir.lexer import ReadError, read_sym
from lenz.sym import (
    ONE,
    ZERO,
    Add,
    FloorDiv,
    Int,
    Mod,
    Mul,
    Sym,
    SymEnv,
    Var,
    affine_in,
    as_int,
    ceildiv,
    divisor,
    evaluate,
    maximum,
    minimum,
    product,
    prove_divides,
    prove_eq,
    prove_le,
    prove_lt,
    show,
    substitute,
    sym,
    to_python,
)
from lenz.sym.expr import sum_of

K, J, N = Var("i", 0, 63), Var("j", 0, 7), Var("n", -5, 5)
S0, S1, S2 = Var("s0", 1), Var("s1", 1), Var("s2", 1)
X = Var("x")
SCOPE = {v.name: v for v in (K, J, N, S0, S1, S2, X)}


def test_interning() -> None:
    assert Int(5) is Int(5) and sym(5) is Int(5) and Int(5).value == 5
    assert Var("i", 0, 63) is K and Var("i", 0, 62) is not K
    assert K + J * 2 is 2 * J + K
    assert Var("k", 0, below=S0) is not Var("k", 0)
    assert Var("k", 0, below=8) is Var("k", 0, 7)
    assert copy.copy(K + 1) is K + 1 and copy.deepcopy(K + 1) is K + 1


def test_node_fields() -> None:
    e = 3 * K + S0 * J + 7
    assert isinstance(e, Add) and e.const == 7 and dict(e.terms) == {K: 3, S0 * J: 1}
    m = S0 * S1 * S0
    assert isinstance(m, Mul) and m.factors == (S0, S0, S1)
    q, r = X // 8, X % S0
    assert isinstance(q, FloorDiv) and (q.num, q.den) == (X, Int(8))
    assert isinstance(r, Mod) and (r.num, r.den) == (X, S0)
    assert (K + J).free_vars == (K, J) and minimum(S0, X * J).free_vars == (J, S0, X)


@pytest.mark.parametrize(
    ("e", "text"),
    [
        (1024 * K + J, "1024*i + j"),
        ((X + N) // 8, "(n + x) // 8"),
        (X % 8, "x % 8"),
        (minimum(X, S0), "min(s0, x)"),
        (maximum(X, minimum(S0, 3)), "max(x, min(3, s0))"),
        (-X, "-x"),
        (-(X // 8), "-(x // 8)"),
        (8 - X // 8 * 3, "-3*(x // 8) + 8"),
        (X // 8 % 4, "x // 8 % 4"),
        ((3 * X) // 8, "3*x // 8"),
        (X // (S0 * 2), "x // (2*s0)"),
        (X // (S0 + S1), "x // (s0 + s1)"),
        (S0 * (X // 8), "s0*(x // 8)"),
        (X * S0 // (S1 * 3), "s0*x // (3*s1)"),
        (sym(-4), "-4"),
        (N - X - 4, "n - x - 4"),
    ],
)
def test_show_and_read(e: Sym, text: str) -> None:
    assert show(e) == repr(e) == text
    assert read_sym(text, SCOPE) is e
    assert read_sym(text.replace(" ", ""), SCOPE) is e


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("i +", "column 4: expected a value"),
        ("i j", "column 3: expected an operator"),
        ("(i", "column 3: expected '\\)'"),
        ("i / 2", "column 3: '/' is not part of the text form"),
        ("k + 1", "column 1: unknown name 'k'"),
        ("min(i, )", "column 8: expected a value"),
        ("", "column 1: expected a value"),
        ("i + " + "9" * 5000, "column 5: '9' is not part of the text form"),
    ],
)
def test_read_errors(text: str, why: str) -> None:
    with pytest.raises(ReadError, match=why):
        read_sym(text, SCOPE)


def test_names() -> None:
    g = Var("@0", -4)
    assert read_sym("@0 % 4", {"@0": g}) is g % 4
    assert show(Var("buf.3") + 1) == "buf.3 + 1"
    for bad in ("", "0a", "a b", "a-b"):
        with pytest.raises(ValueError, match="not a name"):
            Var(bad)
    for refused in (g, Var("a.b"), Var("min"), Var("lambda")):
        with pytest.raises(ValueError, match="Python source"):
            to_python(refused + 1)
    assert to_python(minimum(X, S0) // 8) == "min(s0, x) // 8"


def test_errors() -> None:
    with pytest.raises(ZeroDivisionError):
        X // 0
    with pytest.raises(ZeroDivisionError):
        X % 0
    with pytest.raises(TypeError, match="no truth value"):
        bool(X)
    with pytest.raises(TypeError):
        sym(1.5)  # type: ignore[arg-type]  # the error is what is tested
    with pytest.raises(TypeError, match="a \\+ b"):
        Add()
    with pytest.raises(KeyError):
        evaluate(X + 1, {})


def test_bounds() -> None:
    assert ((8 * K + J).lo, (8 * K + J).hi) == (0, 511)
    assert ((X % 8).lo, (X % 8).hi) == (0, 7)
    assert ((N * N).lo, (N * N).hi) == (-25, 25)
    assert (minimum(X, 4).lo, minimum(X, 4).hi) == (None, 4)
    assert ((S0 * S1).lo, (S0 * S1).hi) == (1, None)
    assert ((S0 * N).lo, (S0 * N).hi) == (None, None)
    assert (X // S0).lo is None and (K // S0).hi == 63
    assert ((K % S0).lo, (K % S0).hi) == (0, 63)


def test_functions() -> None:
    assert product([]) is ONE and product([2, S0, 3]) is 6 * S0
    assert ceildiv(S0, 8) is (S0 + 7) // 8 and ceildiv(9, 4) is Int(3)
    assert as_int(S0 - S0 + 4) == 4 and as_int(S0) is None
    assert affine_in(3 * K + S0 * K + J, K) == (S0 + 3, J)
    assert affine_in(K * K, K) is None and affine_in(K // 2, K) is None
    assert affine_in(J, K) == (ZERO, J) and affine_in(K, K) == (ONE, ZERO)
    assert substitute(K // 8 + J, {K: 8 * S0, J: Int(1)}) is S0 + 1
    assert divisor(12 * K + 8 * S0) == 4 and divisor(ZERO) == 0


def test_divisors_are_joined_only_while_products_fit_in_64_bits() -> None:
    """(x + n // m) // k has no product; m*x might wrap in native code, as m*k might."""
    assert (N // 8) // 4 is N // 32 and (X + N // 8) // 4 is (8 * X + N) // 32
    assert show(N // 2**40 // 2**40) == f"n // {2**40} // {2**40}"
    assert show((X + N // 2**40) // 8) == f"(x + n // {2**40}) // 8"


def test_proofs() -> None:
    p, q = Var("p", 0, below=S0), Var("q", 0, below=S1)
    flat = p * S1 + q
    assert prove_lt(flat, S0 * S1) and prove_le(0, flat) and not prove_lt(flat, S0)
    assert prove_lt(X % S0, S0) and not prove_le(X, S0)
    assert prove_lt(Var("f", 0, below=S0 * S1) // S1, S0)
    assert prove_eq((S0 + 1) * (S0 - 1), S0 * S0 - 1) and not prove_eq(S0, S1)
    assert (
        prove_divides(4, 8 * K + 12) and prove_divides(S0, S0 * K) and not prove_divides(4, 2 * K)
    )
    assert prove_divides(4, minimum(8 * X, 12)) and prove_divides(4, (4 * X) % (8 * S0))
    assert not prove_divides(0, K) and prove_divides(3, 0)


def test_deep_sums_stay_flat() -> None:
    e: Sym = ZERO
    for n in range(300):
        e = e + Var(f"v{n}")
    assert isinstance(e, Add) and len(e.terms) == 300
    deep: Sym = X
    for n in range(60):
        deep = minimum(deep // 3, Var(f"w{n}")) + deep  # doubles as a tree, 60 nodes as a DAG
    assert len(deep.free_vars) == 61
    assert len(deep.key or minimum(deep, ONE).key) < 200
    assert evaluate(substitute(deep, {X: Int(7)}), dict.fromkeys(deep.free_vars, 1)) == evaluate(
        deep, {v: 7 if v is X else 1 for v in deep.free_vars}
    )


def test_env() -> None:
    env = SymEnv().with_var(S1).with_var(S0, hint=32)
    assert env.ranges == (S0, S1) and env.hints == (("s0", 32),)
    assert env.hint(S0 * 2 + S1) == 65 and env.hint(Int(3)) == 3
    assert env.scope() == {"s0": S0, "s1": S1}


def test_a_proof_about_many_sizes_takes_none_out_in_vain() -> None:
    """Each of n sizes was taken out of the sum, though none of them has the end that it needs."""
    sizes = [Var(f"many{k}", 2) for k in range(200)]
    before = affine_in.cache_info().misses
    assert not prove_le(sum_of((s, 1) for s in sizes), 401)
    assert affine_in.cache_info().misses - before < 10
