"""Pointwise operators as compilers' public suites have them: functions, activations, comparisons, numbers as operands."""

from __future__ import annotations

import torch

from tests.blackbox.case import Table, cases

FUNCTIONS: Table = {
    "r(5, 7)": (
        "a.abs() + a.neg()", "torch.sin(a) * torch.cos(a)", "torch.tan(a * 0.5)", "torch.exp(a) - torch.expm1(a)", "torch.exp2(a) + 1",
        "torch.tanh(a) ** 2", "torch.sigmoid(a) * (1 - torch.sigmoid(a))", "torch.erf(a) + torch.erfc(a)", "torch.sinh(a), torch.cosh(a)", "torch.atan(a) * 2",
        "torch.asinh(a)", "torch.floor(a * 3), torch.ceil(a * 3)", "torch.round(a * 2), torch.trunc(a * 2)", "torch.round(a * 10, decimals=1)", "a.frac() + a.sign()",
        "torch.sgn(a) * a", "torch.square(a) + a.reciprocal()", "a.relu().sqrt()", "torch.nan_to_num(1 / a.floor())", "torch.signbit(a), a.isnan(), a.isfinite()",
        "torch.logit(a.sigmoid() * 0.5 + 0.1)", "torch.special.log_ndtr(a)", "torch.special.ndtr(a)", "torch.special.erfcx(a.abs())", "torch.special.i0(a), torch.special.i1(a)",
        "torch.special.bessel_j0(a), torch.special.bessel_j1(a)", "torch.sinc(a) * 1.5", "torch.deg2rad(a), torch.rad2deg(a)", "torch.positive(a) * 2", "torch.lgamma(a.abs() + 0.5)",
        "torch.digamma(a.abs() + 0.5)", "torch.polygamma(1, a.abs() + 0.5)", "a.clamp(-0.5, 0.5)", "a.clamp(min=0.1)", "a.clamp(max=-0.1) * 3", "a.clamp(1.0, -1.0)",
        "torch.clamp(a, a.mean(), a.max())", "torch.heaviside(a, torch.tensor(0.5, dtype=a.dtype))", "torch.frexp(a).mantissa", "torch.ldexp(a, torch.tensor(3))",
        "torch.logaddexp(a, -a) + torch.logaddexp2(a, a * 2)", "torch.hypot(a, a + 1)", "torch.atan2(a, a * 2 - 1)", "torch.copysign(a, a.roll(1))", "torch.nextafter(a, a + 1)",
        "torch.xlogy(a.abs(), a.abs() + 1)", "torch.special.xlog1py(a, a.abs())", "torch.special.entr(a.abs())", "torch.fmod(a, 0.7) + torch.remainder(a, 0.7)",
        "torch.fmod(a, a.roll(1)), torch.remainder(a, a.roll(1))", "torch.floor_divide(a, 0.3)", "torch.div(a, 0.3, rounding_mode='trunc'), torch.div(a, 0.3, rounding_mode='floor')",
        "torch.true_divide(a, 3)", "torch.igamma(a.abs() + 1, a.abs() + 0.5)", "torch.special.zeta(a.abs() + 2, a.abs() + 1)",
        "torch.pow(a.abs(), 0.3) + a ** 3 + a ** -1 + a ** 0", "torch.pow(2, a), torch.pow(-1.5, a.round())", "a.pow(a.roll(1).round())", "torch.float_power(a.abs(), 1.5)", "torch.rsqrt(a.abs() + 1) + torch.log(a.abs() + 1)",
    ),
    "r(6, 5) * 4": ("F.hardsigmoid(a)", "F.hardsigmoid(a) * a"),  # not in float64, whose gradient PyTorch scales by a sixth in float32
    "u(4, 6)": ("torch.asin(a) + torch.acos(a)", "torch.atanh(a) * 2", "torch.erfinv(a)", "torch.log1p(a)", "torch.acosh(a + 2)", "torch.special.logit(a.abs(), eps=1e-3)"),
    "odd()": (
        "a.abs(), a.sign(), a.sgn()", "torch.relu(a), torch.sigmoid(a), torch.tanh(a)", "torch.exp(a), torch.log(a), torch.sqrt(a)", "a.clamp(-1, 1), a.clamp(min=0)",
        "torch.maximum(a, a.flip(0)), torch.minimum(a, a.flip(0))", "torch.fmax(a, a.flip(0)), torch.fmin(a, a.flip(0))", "a.round(), a.floor(), a.trunc()", "a.isnan(), a.isinf(), a.isposinf(), a.isneginf()",
        "torch.nan_to_num(a, 7.0, 8.0, -9.0)", "torch.where(a == a, a, 0.0)", "a == a.flip(0), a < a.flip(0), a != a", "a.amax(), a.amin(), a.argmax(), a.nansum()", "a.softmax(0), a.log_softmax(0), a.logsumexp(0)",
        "F.gelu(a), F.silu(a), F.softplus(a)", "F.hardtanh(a), F.hardswish(a), F.relu6(a), F.leaky_relu(a)", "a.cummax(0), a.sort().values", "torch.fmod(a, 2), torch.remainder(a, 2)", "a.to(torch.bool), a.logical_not()",
        "torch.atan2(a, a.flip(0)), torch.hypot(a, a.flip(0))", "torch.copysign(torch.ones_like(a), a)", "a * 0, a - a, a / a", "F.max_pool1d(a.view(1, 1, -1), 3, 1, 1), F.avg_pool1d(a.view(1, 1, -1), 3)",
    ),
    "r(6, 5)": (
        "F.relu(a), F.relu6(a * 9)", "F.leaky_relu(a, 0.2)", "F.elu(a, 1.3), F.celu(a, 0.8), F.selu(a)", "F.gelu(a), F.gelu(a, approximate='tanh')", "F.silu(a), F.mish(a)", "F.hardtanh(a, -0.4, 0.6)",
        "F.hardswish(a * 4), F.relu6(a * 4)", "F.hardshrink(a, 0.4), F.softshrink(a, 0.4), F.tanhshrink(a)", "F.softplus(a, beta=3, threshold=2)", "F.softsign(a), F.logsigmoid(a)", "F.threshold(a, 0.1, 20.0)",
        "F.glu(torch.cat([a, a * 2], 1), 1)", "F.rrelu(a, 0.1, 0.3, training=False)", "F.prelu(a, torch.full((5,), 0.2, dtype=a.dtype))", "F.softmin(a, 0)", "F.normalize(a, p=1.0, dim=1)",
    ),
}  # fmt: skip
PAIRS: Table = {
    "r(4, 5), r(4, 5)": (
        "a + b, a - b, a * b, a / b", "torch.add(a, b, alpha=2), torch.sub(a, b, alpha=0.5), torch.rsub(a, b)", "torch.maximum(a, b) - torch.minimum(a, b)", "torch.lerp(a, b, 0.3), torch.lerp(a, b, b.sigmoid())",
        "torch.addcmul(a, b, b, value=0.4)", "torch.addcdiv(a, b, b.abs() + 1, value=-0.4)", "a > b, a <= b, a == b, a != b", "torch.where(a > b, a, b * 2)", "torch.where(a > 0, a, 0), torch.where(a > 0, 1.0, b)", "(a - b).abs().lt(0.5).float().sum()",
        "torch.isclose(a, b, rtol=0.5)", "torch.dist(a, b), torch.allclose(a, b)", "torch.cross(a[:3].T, b[:3].T, dim=1)", "torch.logical_and(a, b), torch.logical_xor(a > 0, b)", "torch.complex(a.float(), b.float()).abs()", "torch.polar(a.float().abs(), b.float()).real",
    ),
    "r(3, 1, 5), r(4, 1)": ("a * b + 1", "torch.where(a > b, a, b)", "(a - b) / (a.abs() + b.abs())", "torch.atan2(a, b)"),
    "r(5), r()": ("a * b", "b / (a.abs() + 1)", "torch.where(b > 0, a, -a)", "a.clamp(min=b)"),
    "r(1), r(1, 1)": ("a + b", "(a * b).sum()", "torch.cat([a[None], b])"),
    "r(3, 4)": (
        "1 - a, 2 / (a.abs() + 1), 3 ** a, 1.5 // (a.abs() + 1), 7 % (a.abs() + 1)", "a + True, a * 3, a - 0.5, a / 4", "torch.add(a, 2, alpha=3)", "1.0 - a", "torch.mul(3, a), torch.div(42, a)",
        "a.add(1).mul(2).sub(3).div(4)", "torch.tensor(2.5) * a", "a * torch.tensor([1, 2, 3, 4])", "a + 1j", "torch.where(torch.tensor(True), a, a * 2)", "a.clone().detach() + a", "a.to(torch.float64) * 2.5", "float(3) * a + int(2)", "a.mul(a.shape[0]).div(a.numel())",
    ),
}  # fmt: skip

CASES = (
    *cases("pointwise", FUNCTIONS),
    *cases("pointwise", PAIRS),
    *cases("pointwise", {key: FUNCTIONS[key] for key in ("odd()", "r(6, 5)")}, (torch.bfloat16, torch.float64)),
    *cases("pointwise", {key: PAIRS[key] for key in ("r(4, 5), r(4, 5)", "r(3, 4)")}, (torch.float16,)),
)
