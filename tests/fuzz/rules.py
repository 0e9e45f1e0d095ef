"""What lines of random programs may be: one template per line of a table.

A table's lines are `flags template`. Flags: p picks or moves values and does not compute; r rounds;
e its floats must be exact, since a rounding would flip the result, x whole; k exact where gradients
are asked for, u no number twice there: which of several has the gradient, eager leaves open; s the
same however floats are rounded; c a cast; w writes into its first operand; `.` is none of these.
What is in braces is filled in by `generator`:

    x any tensor    f floats    h whole numbers (no bool)    w numbers    b bool    i indices
    y like x, to be broadcast with it    g floats, so    s of x's shape and type    u of x's shape
    A digit behind one of these is its least number of dimensions, F4 or X2 its very number.
    d e  dimensions of the first    D a list of them    E the same, not empty    O a tuple of E
    n  the size of dimension d    m  the positions along d    v  the device    z  zeros as indices
    k  -3..3    p  1..3    c  a small number, or a number among the arguments    B  True or False
    t  a type

Eager's gelu of an infinity is NaN on CPUs with AVX-512, unless there are strides. The mean of
var_mean is NaN or infinite where an element is, as the order of Welford's steps has it.
Its median of what is expanded reads behind it (docs/upstream/torch_median_expanded.py).
On GPUs its rms_norm of an infinity is all NaN. A NaN has any sign. Eager computes hardsigmoid of
float64 with 1/6 as a float32, so float64 does not come to it.
Its layer_norm of one f16 computes x * 316 - mean * 316: 0.7 instead of 0 for large x. So the eps of
one half number is larger.
Its pixel_unshuffle of what is empty keeps the shape, on CPUs, which fake tensors and GPUs change.
"""

from __future__ import annotations

__all__ = ["RULES"]

TABLES: dict[str, tuple[int, str]] = {
    "exact unary": (
        8,
        """
        p {w}.neg()
        pk {w}.abs()
        pk F.relu({w})
        k F.relu6({f})
        k F.hardtanh({f}, -2, 2)
        e {w}.sign()
        e {f}.floor()
        e {f}.ceil()
        e {f}.round()
        e {f}.trunc()
        e {f}.frac()
        e {x}.logical_not()
        e {f}.isnan()
        e {f}.isfinite()
        e {f}.isinf()
        e torch.nan_to_num({f}, 1.0, 4.0, -4.0).signbit()
        e torch.isneginf({f})
        e torch.isposinf({f})
        . {w}.square()
        . torch.positive({w})
        p {x}.clone()
        p {x}.contiguous()
        p torch.nan_to_num({f}, nan=1.0, posinf=4.0, neginf=-4.0)
        . {h}.bitwise_not()
        . {b}.logical_not()
        e {f}.sgn()
        p {x}.detach()
        p F.threshold({f}, -1, 2)
        e F.hardshrink({f}, 1.5)
        k F.softshrink({f}, 1.0)
        k F.leaky_relu({f}, 0.5)
        """,
    ),
    "rounded unary": (
        8,
        """
        r {f}.clamp(-8, 8).exp()
        r {f}.clamp(-8, 8).exp2()
        r {f}.clamp(-8, 8).expm1()
        r {f}.sigmoid()
        r {f}.tanh()
        r {f}.sin()
        r {f}.cos()
        r torch.atan({f})
        r torch.asinh({f})
        r {f}.clamp(-4, 4).sinh()
        r {f}.clamp(-4, 4).cosh()
        r {f}.erf()
        r {f}.erfc()
        r ({f}.abs() + 1).rsqrt()
        r ({f}.abs() + 1).log1p()
        r ({f}.abs() + 1).log()
        r ({f}.abs() + 2).log2()
        r ({f}.abs() + 2).log10()
        r ({f}.abs() + 1).sqrt()
        r ({f}.abs() + 1).reciprocal()
        r ({f}.abs() + 1).lgamma()
        r torch.acosh({f}.abs() + 2)
        r torch.atanh({f}.clamp(-4, 4) / 8)
        r torch.acos({f}.clamp(-4, 4) / 8)
        r torch.asin({f}.clamp(-4, 4) / 8)
        r torch.erfinv({f}.clamp(-4, 4) / 8)
        r torch.tan({f}.clamp(-4, 4) / 4)
        r torch.logit({f}.clamp(-4, 4) / 16 + 0.5)
        r F.gelu({f}.clamp(-65504, 65504))
        r F.gelu({f}, approximate="tanh")
        r F.silu({f})
        r F.mish({f})
        r F.softplus({f})
        r F.softplus({f}, 2.0, 3.0)
        r F.logsigmoid({f})
        r F.elu({f})
        r F.celu({f}, 0.5)
        rk F.selu({f})
        r F.hardswish({f}.to(torch.float32))
        r F.hardsigmoid({f}.to(torch.float32))
        r F.softsign({f})
        r F.tanhshrink({f})
        r torch.deg2rad({f})
        r torch.rad2deg({f})
        r torch.sinc({f})
        r torch.special.entr({f}.abs() + 1)
        r torch.special.ndtr({f})
        r torch.special.erfcx({f}.abs())
        r torch.special.i0({f}.clamp(-4, 4))
        r torch.digamma({f}.abs() + 1)
        r {h}.sin()
        r ({h}.abs() + 1).to(torch.float32).sqrt()
        """,
    ),
    "binary": (
        14,
        """
        . {w} + {y}
        . {w} - {y}
        . {w} * {y}
        . torch.add({w}, {y}, alpha=2)
        . torch.sub({w}, {y}, alpha=3)
        . torch.rsub({w}, {y})
        . {w} + {c}
        . {w} * {c}
        . {c} - {w}
        p torch.maximum({w}, {y})
        p torch.minimum({w}, {y})
        p torch.fmax({w}, {y})
        p torch.fmin({w}, {y})
        r {f} / ({g}.abs() + 1)
        r {w} / 3
        r {f} / {c}
        re {f} / {g}
        x torch.div({w}, {y}.abs() + 1, rounding_mode="floor")
        x torch.div({w}, {y}.abs() + 1, rounding_mode="trunc")
        x {w} // ({y}.abs() + 1)
        x {w}.remainder({y}.abs() + 2)
        x {w}.fmod({y}.abs() + 2)
        e {w}.remainder(-3)
        e {w}.remainder(5)
        e {w}.fmod(3)
        e {x} < {y}
        e {x} <= {y}
        e {x} == {y}
        e {x} != {y}
        e {x} > {y}
        e {x} >= {y}
        e {w} > {c}
        e torch.logical_and({x}, {y})
        e torch.logical_or({x}, {y})
        e torch.logical_xor({x}, {y})
        e torch.isclose({f}, {s})
        . {h} & 5
        . {h} | 3
        . {h} ^ 6
        . {b} & {b}
        . {b} ^ {b}
        . {b} | {b}
        . ({h} & 7) << ({h} & 3)
        . {h} >> ({h} & 3)
        r torch.hypot({f}, {g})
        r torch.atan2({f}, {g}.abs() + 1)
        re torch.atan2({f}, {g})
        e torch.copysign({f}, torch.nan_to_num({g}, 1.0, 4.0, -4.0))
        re torch.nextafter({f}, {s})
        e torch.heaviside({f}, {s})
        r torch.logaddexp({f}, {s})
        r torch.logaddexp2({f}, {s})
        r torch.xlogy({f}, {g}.abs() + 1)
        r torch.special.xlog1py({f}, {g}.abs() + 1)
        r ({f}.abs() + 1).pow({g}.clamp(-2, 2))
        . {w}.clamp(-4, 4).pow(2)
        . {f}.clamp(-4, 4).pow(3)
        r ({f}.abs() + 1).pow(0.5)
        r ({f}.abs() + 1).pow(-1.5)
        e torch.ldexp({f}, {h}.clamp(-2, 2))
        """,
    ),
    "ternary": (
        4,
        """
        . torch.addcmul({f}, {f}.clamp(-4, 4), {f}, value=2)
        r torch.addcdiv({f}, {f}, {f}.abs() + 1)
        r torch.lerp({f}, {s}, 0.25)
        r torch.lerp({f}, {s}, {s})
        p torch.where({b}, {x}, {y})
        p torch.where({b}, {w}, {c})
        p {x}.masked_fill({b}, {k})
        k {w}.clamp(-2, 3)
        k {w}.clamp(min={k})
        k torch.clamp({f}, {s}, {s})
        p {x}.clone().masked_scatter({b}, {x}.contiguous())
        """,
    ),
    "view": (
        16,
        """
        p {x1}.transpose({d}, {e})
        p {x}.unsqueeze(-1)
        p {x1}.unsqueeze({d})
        p {x}.squeeze()
        p {x1}.squeeze({d})
        p {x1}.select({d}, -1)
        p {x1}.select({d}, {n} // 2)
        p {x1}.narrow({d}, {n} // 3, {n} // 2)
        p {x1}.flip({d})
        p {x1}.flip({E})
        p {x1}.roll({k}, {d})
        p {x2}.roll(({k}, {p}), (0, 1))
        p {x1}.roll({k})
        p {x1}.reshape(-1)
        p {x1}.flatten(0, {d})
        p {x1}.unsqueeze(0).expand(2, *[-1] * {x1}.dim())
        p {x1}.expand_as({u1})
        p {x2}.diagonal()
        p {x2}.diagonal({k})
        p {x1}[..., ::2]
        p {x1}[..., 1::3]
        p {x1}[::2]
        p {x1}[1:-1]
        p {x1}[-2:]
        p {x2}[:, {k}:]
        p {x1}.unfold({d}, 2, 1)
        p {x1}.unfold({d}, 2, 3)
        p {x}.movedim(0, -1)
        p {x1}.repeat(*[2] * {x1}.dim())
        p {x1}.tile(2)
        p {x1}.unsqueeze(-1).repeat(*[1] * {x1}.dim(), {c} * {c})
        p {x1}.new_ones({n}, {c} * {c})
        p {x1}.repeat_interleave(2, {d})
        p {x3}.permute(2, 0, 1)
        p {X4}.contiguous(memory_format=torch.channels_last)
        p {x1}.unflatten({d}, (-1, 2))
        p {x1}.unflatten({d}, (3, -1))
        p {x1}.view({x1}.shape)
        p {x1}.chunk(2, {d})[-1]
        p {x1}.tensor_split(3, {d})[1]
        p torch.split({x1}, 2, {d})[0]
        p {x1}.unbind({d})[0]
        p {x1}.as_strided((2, 2), (1, 1))
        p {x1}.rot90(1, (0, -1))
        p {x}.broadcast_to(2, *{x}.shape)
        p {x2}.t() if {x2}.dim() == 2 else {x2}.mT
        p {h}.view(torch.int8)
        p {b}.view(torch.uint8).clone()
        p F.pixel_shuffle({f3}, 2)
        p F.pixel_unshuffle({f3}, 2) if {f3}.numel() else {f3}.clone()
        p F.channel_shuffle({X4}, 2)
        """,
    ),
    "pad": (
        6,
        """
        p F.pad({x1}, (1, 2), value=1)
        p F.pad({x1}, (-1, 1))
        p F.pad({x2}, (1, 0, {k}, 2), value=-2)
        p F.pad({x2}, (0, -1, 2, -1))
        p F.pad({X3}, (1, 1), mode="reflect")
        p F.pad({X3}, (2, 1), mode="replicate")
        p F.pad({X3}, (1, 1), mode="circular")
        p F.pad({X4}, (1, 1, 1, 0), mode="reflect")
        p F.pad({X4}, (1, 2, 0, 1), mode="replicate")
        p torch.cat([{x1}, {s}, {x1}], {d})
        p torch.cat([{x1}, {s}[:1]], 0)
        p torch.cat([{x1}[1:], {s}[:0], {x1}], 0)
        p torch.stack([{x}, {u}, {x}], -1)
        p torch.hstack([{x1}, {s}])
        p torch.vstack([{x1}, {s}])
        p {x2}.tril({k})
        p {x2}.triu({k})
        p torch.diag_embed({x1}, {k})
        p torch.select_scatter({x1}, {x1}.select({d}, 0) + 1, {d}, -1)
        p torch.slice_scatter({x1}, {x1}.narrow({d}, 0, 1) + 1, {d}, 1, 2)
        p torch.diagonal_scatter({x2}, {x2}.diagonal() + 1)
        p torch.zeros_like({x1})
        p torch.full_like({w}, 2)
        p {w}.new_ones(3)
        p torch.arange({x1}.shape[{d}], device={x1}.device) - 1
        p torch.eye(3, device={x}.device)
        p torch.ones({x1}.shape[0], 1, device={x}.device)
        """,
    ),
    "reduce": (
        12,
        """
        . {w}.sum({D}, keepdim={B})
        . {w}.sum()
        . {b}.sum({D}, keepdim={B})
        r {f}.mean({D}, keepdim={B})
        r {f}.mean()
        . {w}.clamp(-1, 1).prod({d}, keepdim={B})
        . {W1}[:12].clamp(0, 2).prod()
        p {x1}.amax({O}, keepdim={B})
        p {x1}.amin({O}, keepdim={B})
        p {w1}.max({d}, keepdim={B}).values
        e {x1}.max({d}, keepdim={B}).indices
        e {x1}.min({d}, keepdim={B}).indices
        p {w}.max()
        p {w}.min()
        e {w1}.argmax({d}, keepdim={B})
        e {w1}.argmin({d}, keepdim={B})
        e {w}.argmax()
        e {x}.any({D}, keepdim={B})
        e {x}.all({D}, keepdim={B})
        e {x1}.any({d})
        e {x}.count_nonzero()
        e {x1}.count_nonzero({d})
        r torch.logsumexp({f1}, {E}, keepdim={B})
        rk torch.linalg.vector_norm({f}, 2)
        rk torch.linalg.vector_norm({f1}, 2, {E}, keepdim={B})
        rk {f1}.norm(p=3, dim={d}, keepdim={B})
        k torch.linalg.vector_norm({f1}, 1, {E})
        p torch.linalg.vector_norm({f1}, float("inf"), {E})
        r {f1}.var({E}, correction=0, keepdim={B})
        rk {f1}.std({E}, correction=0, keepdim={B})
        r torch.var_mean(torch.nan_to_num({f1}, 1.0, 4.0, -4.0), {E}, correction=0)[1]
        . {f}.nansum({D}, keepdim={B})
        r {w}.sum(dtype=torch.float64)
        p torch.aminmax({w1}, dim={d}).max
        r torch.dist({f}, {s})
        s ({f1} == {f1}.amax({d}, keepdim=True)).any({d})
        s ({f1} > {f1}.amin({d}, keepdim=True)).all({d})
        s {f1} < {f1}.sort({d}).values.select({d}, 0).unsqueeze({d})
        s {f1}.gather({d}, {f1}.argmax({d}, keepdim=True)) == {f1}.max({d}, keepdim=True).values
        . {X2}.trace()
        """,
    ),
    "rows": (
        8,
        """
        r F.softmax({f1}, {d})
        r F.log_softmax({f1}, {d})
        r F.softmin({f1}, -1)
        r F.layer_norm({f1}, {f1}.shape[-1:], eps=1e-5 if {f1}.shape[-1] * {f1}.itemsize > 2 else 1)
        r F.layer_norm({f2}, {f2}.shape[-2:], eps=1e-2)
        r F.layer_norm({f1}, {f1}.shape[-1:], {f1}[(0,) * ({f1}.dim() - 1)], None)
        r F.rms_norm(torch.nan_to_num({f1}, 1.0, 4.0, -4.0), {f1}.shape[-1:], eps=0.5)
        r F.group_norm({f3}, 1)
        r F.instance_norm({f3}, eps=1e-2)
        r F.batch_norm({f2}, None, None, training=True, eps=1e-2)
        r {f1} / ({f1}.abs().sum(-1, keepdim=True) + 1)
        k {f1} - {f1}.amax({d}, keepdim=True)
        r {f1} - {f1}.mean({d}, keepdim=True)
        r F.normalize({f1} + 6, dim={d})
        r F.cosine_similarity({f1} + 6, {s} + 6, dim={d})
        r F.glu(torch.cat([{f1}, {f1}], {d}), {d})
        r F.mse_loss({f}, {s})
        r F.mse_loss({f}, {s}, reduction="none")
        k F.l1_loss({f}, {s}, reduction="sum")
        r F.smooth_l1_loss({f}, {s})
        r F.huber_loss({f}, {s}, reduction="none", delta=2.0)
        r F.binary_cross_entropy_with_logits({f}, {s}.sigmoid())
        r F.soft_margin_loss({f}.clamp(-8, 8), torch.ones_like({f}))
        r F.kl_div(F.log_softmax({f1}, -1), F.softmax({s}, -1), reduction="mean")
        r F.cross_entropy({F2}, torch.arange({F2}.shape[0], {v}) % {F2}.shape[1])
        r F.nll_loss({F2}, torch.arange({F2}.shape[0], {v}) % {F2}.shape[1])
        r F.poisson_nll_loss({f}.clamp(-4, 4), {s})
        r F.gaussian_nll_loss({f}, {s}, {s}.abs() + 1)
        """,
    ),
    "scan": (
        5,
        """
        . {w1}.cumsum({d})
        . {w1}.flip({d}).cumsum({d}).flip({d})
        . {w1}.clamp(0, 1).cumprod({d})
        pk {w1}.cummax({d}).values
        pk {w1}.cummin({d}).values
        e {w1}.cummax({d}).indices
        e {w1}.cummin({d}).indices
        r {f1}.logcumsumexp({d})
        . {x1}.diff(dim={d})
        . {b}.cumsum(-1)
        . torch.trapezoid({f1})
        """,
    ),
    "gather": (
        7,
        """
        p {x1}[{i}.remainder({x1}.shape[0])]
        p {x1}[{i} % {x1}.shape[0] - {x1}.shape[0]]
        p {x2}[:, {i}.remainder({x2}.shape[1])]
        p {x2}[{i}.remainder({x2}.shape[0]), {i}.remainder({x2}.shape[1])]
        p F.embedding({i}.remainder({X2}.shape[0]), {X2})
        p torch.gather({x1}, {d}, {x1}.argsort(dim={d}, stable=True))
        p torch.gather({x1}, {d}, ({x1} > 0).long() * ({n} - 1))
        p torch.take_along_dim({x1}, {i}.remainder({n}).reshape([1] * {x1}.dim()), {d})
        p {x1}.index_select({d}, {m}.flip(0))
        p {x1}.index_select({d}, {i}.reshape(-1).remainder({n}))
        p {x}.take({i}.remainder(max({x}.numel(), 1)))
        p {x1}[{i}.reshape(-1).remainder({x1}.shape[0])[:2]]
        e F.one_hot({i}.remainder(4), 4)
        e torch.bucketize({w}, torch.tensor([-2.0, 0.0, 3.0], {v}).to({w}.dtype))
        e torch.searchsorted(torch.arange(5, {v}), {h}.long())
        e torch.isin({h}, torch.tensor([1, 3], {v}))
        """,
    ),
    "scatter": (
        6,
        """
        . {w1}.index_add({d}, ({m} * {p}) % max({n} - 1, 1), {w1})
        p {x1}.index_copy({d}, {m}.flip(0), {x1})
        p {x1}.index_fill({d}, {m}[:2] - 1, 2)
        p {w1}.index_reduce({d}, ({m} * {p}) % max({n} - 1, 1), {w1}, "amax")
        p {w1}.scatter({d}, torch.argsort({w1}, dim={d}, stable=True), 3)
        . {w1}.scatter_add({d}, ({s} > 0).long() % {n}, {s})
        pe {w1}.scatter_reduce({d}, ({w1} > 1).long() % {n}, {s}, "amin", include_self=False)
        p {w1}.scatter_reduce({d}, {z}, {s}, "amax")
        . {w1}.scatter_reduce({d}, {z}, {s}, "sum")
        r {f1}.scatter_reduce({d}, {z}, {s}, "mean")
        . {w1}.clamp(0, 2).scatter_reduce({d}, {z}, {s}.clamp(0, 1), "prod")
        . {w1}.index_put(({i}.reshape(-1).remainder({w1}.shape[0]),), {s}[0], accumulate=True)
        p {w1}.index_put(({i}.reshape(-1)[:1].remainder({w1}.shape[0]),), {s}[:1])
        . torch.zeros(5, {v}).index_add(0, {i}.reshape(-1) % 5, {i}.reshape(-1).to(torch.float32))
        . torch.bincount({i}.reshape(-1) % 5, minlength=5)
        """,
    ),
    "cast": (
        6,
        """
        c {x}.to({t}, copy=True)
        e {x}.to(torch.int32, copy=True)
        e {x}.to(torch.int64, copy=True)
        e {b}.to(torch.uint8, copy=True)
        e {x}.to(torch.int16, copy=True)
        e {x}.to(torch.bool, copy=True)
        pe {f}.to(torch.float8_e4m3fn).to({f}.dtype)
        pe {f}.to(torch.float8_e5m2).to({f}.dtype)
        pe {f}.to(torch.float8_e5m2).to(torch.float32)
        pe {f}.to(torch.float8_e4m3fn).to(torch.bfloat16)
        pe {f}.to(torch.float8_e4m3fnuz).to(torch.float32)
        pe {f}.to(torch.float8_e5m2fnuz).to(torch.float16)
        pe {f1}.to(torch.float8_e5m2)[1:].to(torch.float16)
        pe {f2}.to(torch.float8_e4m3fn).transpose({d}, {e}).contiguous().to({f2}.dtype)
        e {f}.to(torch.float8_e4m3fn).view(torch.uint8)
        e {f}.to(torch.float8_e5m2).view(torch.int8)
        e torch.nan_to_num({f}, 1.0, 4.0, -4.0).view(getattr(torch, f"int{8 * {f}.element_size()}"))
        e (torch.nan_to_num({f1}, 1.0, 4, -4).contiguous().view(torch.int16) & 16).view(torch.half)
        """,
    ),
    "layout": (
        3,
        """
        p torch.ops.fuzz.turned({x2})
        p torch.ops.fuzz.padded({x1})
        p torch.ops.fuzz.shifted({x1})
        p {X4}.to(memory_format=torch.channels_last)
        p {X4}.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        p {x2}.transpose({d}, {e}).clone()
        p {x1}.clone(memory_format=torch.contiguous_format)
        p {x1}[..., :1].expand({x1}.shape).contiguous()
        p torch.empty_like({x2}.transpose({d}, {e})).copy_({x2}.transpose({d}, {e}))
        p {x2}.new_empty_strided({x2}.shape, {x2}.mT.stride()).fill_(1) if {x2}.dim() == 2 else {x2}
        p {x1}.as_strided(({n},), ({x1}.stride({d}),))
        p {x1}.as_strided(({n}, 1), ({x1}.stride({d}), 1))
        """,
    ),
    "library": (
        5,
        """
        . {F2} @ {F2}.t()
        . torch.mm({F2}, {F2}.t().contiguous())
        . {F2}.t() @ {F2}
        . torch.bmm({F3}, {F3}.transpose(1, 2))
        . F.linear({f1}, torch.ones(3, 1, dtype={f1}.dtype, {v}).expand(3, {f1}.shape[-1]))
        . torch.addmm({F2}[:1, :1], {F2}, {F2}.t())
        . torch.einsum("...i,...i->...", {f1}, {s})
        . torch.outer({F1}, {F1})
        p torch.sort({x1}, dim={d}, stable=True).values
        e torch.sort({x1}, dim={d}, stable=True).indices
        e torch.sort({x1}, dim={d}, descending=True, stable=True).indices
        p torch.sort({x1}, dim={d}, descending=True, stable=True).values
        pku {w1}.topk(1, {d}).values
        pku {w1}.topk(min({n}, 2), {d}, largest={B}).values
        pku {w1}.clone().median({d}, keepdim={B}).values
        pku {f1}.clone().nanmedian({d}).values
        pku {w1}.kthvalue(1, {d}).values
        pku {w1}.clone().median({d}).values
        p F.max_pool1d({F3}, 2)
        p F.max_pool2d({F4}, 2, 1)
        p F.max_pool2d({F4}, 3, 2, 1)
        r F.avg_pool1d({F3}, 2)
        r F.avg_pool2d({F4}, 2, 1)
        r F.avg_pool2d({F4}.contiguous(), 3, 2, 1, count_include_pad=False)
        r F.adaptive_avg_pool2d({F4}, (2, 3))
        p F.adaptive_max_pool2d({F4}, 2)
        p F.interpolate({F4}, scale_factor=2)
        r F.interpolate({F4}, size=(5, 3), mode="bilinear")
        r F.interpolate({F4}, size=(4, 7), mode="bilinear", align_corners=True)
        . F.conv1d({F3}, torch.ones(2, 1, 2, dtype={F3}.dtype, {v}).expand(2, {F3}.shape[1], 2))
        . F.fold(F.unfold({F4}, 2), {F4}.shape[-2:], 2)
        r F.scaled_dot_product_attention({F3}, {F3}, {F3})
        """,
    ),
    "complex": (
        3,
        """
        r (torch.complex({f}, {s}) * 2j).real
        r (torch.complex({f}, {s}) * (1 + 2j)).imag
        r (torch.complex({f}, {s}) / (1 - 2j)).real
        r (torch.complex({f}, {s}) - {f} * 1j).imag
        r torch.view_as_real(1j * {f}).flatten(-2)
        r torch.view_as_real(torch.complex({f}, {s}).conj() * torch.complex({f}, {s})).sum(-1)
        r torch.exp(1j * {f}).imag
        r torch.polar({f}.clamp(0, 4), {s}).real
        r (torch.complex({f2}, {s}).mH @ torch.complex({f2}, {s})).imag
        p torch.complex({f1}, {s}).flip(0).conj().imag
        r torch.complex({f}, {s}).mean({d}).real
        r (torch.complex({f}, {s}) + {x} * 1j).abs()
        """,
    ),
    "write": (
        10,
        """
        w {w}.add_({y})
        w {w}.sub_({c})
        kw {w}.mul_(2).clamp_(-8, 8)
        pw {x}.copy_({y})
        pw {x}.fill_({k})
        pw {x}.zero_()
        kw {w1}[1:].add_({y}).clamp_(-8, 8)
        kw {w1}[::2].mul_(2).clamp_(-8, 8)
        pw {x1}[0].copy_({x1}[-1] + 0)
        pw {x1}[..., -1:].fill_(3)
        pw {x2}.t().copy_({x2}.t().flip(0) + 0) if {x2}.dim() == 2 else {x2}.copy_({x2}.flip(0) + 0)
        pw {x1}.copy_({x1}.flip(0) + 0)
        pw {x1}.index_fill_(0, torch.tensor([0], {v}), 2)
        kw {w1}.index_add_(0, torch.arange(1, {v}), {w1}[:1] + 0).clamp_(-8, 8)
        pw {x}.masked_fill_({b}, 1)
        rw {f}.sigmoid_()
        pkw F.relu_({f})
        pw {x1}.flatten()[1:3].fill_(2)
        pw {x1}.view(-1)[::3].fill_(1)
        pw {x1}[{i}.reshape(-1).remainder({x1}.shape[0])] = {k}
        pw {x2}.diagonal().fill_(1)
        pw {x1}.select({d}, 0).zero_()
        pw {x}.unsqueeze(0).neg_() if {x}.dtype is not torch.bool else {x}.zero_()
        pkw {w}.abs_()
        pw {x1}.transpose({d}, {e})[:1].copy_({k} * torch.ones_like({x1}.transpose({d}, {e})[:1]))
        pw {x1}.put_(torch.tensor([0], {v}), {x1}.reshape(-1)[-1:] + 0)
        pw {x1}.scatter_({d}, {z}, 1)
        pw torch._foreach_neg_([{w}])
        """,
    ),
}


def _read(table: str) -> tuple[tuple[str, str], ...]:
    found = []
    for line in table.strip().splitlines():
        flags, template = line.strip().split(" ", 1)
        found.append((flags.replace(".", ""), template))
    return tuple(found)


RULES: dict[str, tuple[int, tuple[tuple[str, str], ...]]] = {
    name: (weight, _read(table)) for name, (weight, table) in TABLES.items()
}
"""Tables by name: how often one is chosen, and its rules, each (flags, template)."""
