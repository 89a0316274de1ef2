"""Types as compilers' public suites have them: integers, truths, casts, promotion, autocast, complex numbers, random numbers."""

from __future__ import annotations

from tests.blackbox.case import Table, cases

WHOLE: Table = {
    "i(4, 5), i(4, 5)": (
        "a + b, a - b, a * b", "a / (b.abs() + 1)", "a // (b.abs() + 1), a % (b.abs() + 1)", "torch.div(a, b.abs() + 2, rounding_mode='trunc'), torch.fmod(a, b.abs() + 2)", "a & b, a | b, a ^ b, ~a", "a << 2, a >> 1", "torch.bitwise_left_shift(a.abs(), b.abs() % 4)", "a.abs().pow(2), 2 ** a.abs()", "a > b, a == b", "torch.maximum(a, b), torch.minimum(a, b)", "a.sum(), a.sum(1), a.prod(0)", "a.cumsum(1), a.cumprod(0)", "a.amax(1), a.argmax(0), a.max(1)", "a.float().mean(1)", "a.clamp(-3, 4), a.clamp(min=b)", "a.sort(1), a.topk(2)", "torch.gcd(a, b), torch.lcm(a, b)", "a.to(torch.float16) * 1.5", "a.to(torch.bool).any(1)", "torch.where(a > 0, a, b), torch.where(a > 0, 1, 0)", "a + 1.5, a * 0.5, a / 2", "a.neg().sign()", "a @ b.T", "a.remainder(3), a.remainder(-3), a.fmod(-3)", "a // 2, a // -2, -7 // (a.abs() + 1)", "a.exp(), a.sigmoid(), a.sqrt()", "a.add(b, alpha=3)", "a.to(torch.uint8), a.to(torch.int8) * 30", "torch.addcmul(a, a, b)", "a.square() - b.square()", "torch.isin(a, b)", "a.flatten().abs().bincount()", "a // b", "a % b", "a.logical_and(b), a.logical_not()", "a.float().round().long() + a", "a.median(1), a.mode(1)", "torch.floor_divide(a, b.abs() + 1)", "a.true_divide(b.abs() + 1).floor()",
    ),
    "i(3, 4, to=torch.int32), i(3, 4, to=torch.int8)": ("a + b", "a * 100000 * 30000", "b * 100 + b", "a.sum(), b.sum(0)", "a / (b.abs() + 1)", "a.to(torch.int8) ^ b", "a < b", "b.abs().sum(1, dtype=torch.int8)", "a.prod(), b.prod(1)", "a.bitwise_not(), b.neg()"),
    "i(3, 4, to=torch.uint8)": ("a + 200, a - 10", "a.sum(), a // 3", "a >> 1, ~a", "a.float() / 255", "a.neg() + 1", "a.amax(0), a.to(torch.int16) - 300"),
    "b(3, 5), b(3, 5)": ("a & b, a | b, a ^ b, ~a", "a + b, a * b", "a.sum(), a.float().mean()", "a.any(1), a.all(0)", "torch.where(a, 1.0, 2.0)", "a.to(torch.float32) - 1", "a == b, a > b, a.logical_xor(b)", "a.cumsum(1)", "a.long() * 3", "a.int().argmax(1)", "a.amax(1), a.prod(1)", "a - b", "a.max(1).values, torch.maximum(a, b)"),
}  # fmt: skip
MIXED: Table = {
    "r(3, 4)": ("a.half() + a", "a.double() * a", "a.bfloat16().float() + a", "a.to(torch.int32) + a", "(a * 10).to(torch.int8).to(torch.float32)", "a.half().sum(), a.bfloat16().sum(1)", "a.half().softmax(1).float()", "a.type(torch.float64).relu().type_as(a)", "a * torch.tensor(2, dtype=torch.int64)", "a.half() * torch.tensor(3.0)", "a.bfloat16() + a.half()", "a.to(torch.complex64).abs()", "(a + 1j * a).abs(), (a * 1j).imag", "torch.fft.rfft(a).abs()", "torch.complex(a, a) * (2 - 1j), torch.complex(a, -a) * (2 - 1j)", "((a * 1j) * (a * 1j + 2)).real", "(a * 1j).exp().imag + (a * 1j).exp().real", "torch.view_as_real(a * (1 + 2j)).sum(-1)", "a.to(torch.bool) * a", "torch.result_type(a, 1) == torch.float32, a * 2", "a.float().to(torch.float16).to(torch.bfloat16)", "a.to(torch.float8_e4m3fn).to(torch.float32)", "a.to(torch.float8_e5m2).to(torch.float32).to(torch.float8_e5m2).float() * 2", "a.to(torch.float8_e4m3fn).float().to(torch.float8_e4m3fn).half()", "a.abs().to(torch.int32).to(torch.uint16).to(torch.int32) + 1", "a.abs().to(torch.uint32).to(torch.int64).to(torch.uint32).to(torch.int64)", "a.abs().long().to(torch.uint64).to(torch.float64) * 0.5", "a.to(torch.uint16) if a.numel() == 0 else a.abs().to(torch.uint16)", "torch.stack([a, a]).to(torch.float8_e4m3fn).view(torch.uint8).long()", "torch.cat([a, a.half()])", "torch.stack([a.double(), a.double() * 2]).float()", "a.sum(dtype=torch.float16), a.mean(dtype=torch.float64)", "(a > 0) + a, (a > 0) * 2", "a.long().double() / 3", "torch.finfo(a.dtype).eps + a", "torch.promote_types(a.dtype, torch.float64) == torch.float64, a + 1", "torch.tensor([1, 2, 3, 4], dtype=a.dtype) * a", "a.round().to(torch.int64) % 3", "with torch.autocast('cpu', torch.bfloat16): y = a @ a.T; return y, y + 1", "with torch.autocast('cpu', torch.bfloat16): y = F.softmax(a @ a.T, -1); return y", "with torch.autocast('cpu', torch.float16): y = a.sum() + (a @ a.T).sum(); return y"),
    "r(3, 4) @ nn.Linear(4, 4)": ("with torch.autocast('cpu', torch.bfloat16): y = m(a).relu(); return y.float() * 2", "with torch.autocast('cpu', torch.bfloat16): y = F.layer_norm(m(a), (4,)); return y", "with torch.autocast('cpu', torch.bfloat16): y = F.mse_loss(m(a), a); return y", "with torch.autocast('cpu', torch.float16): y = m(m(a)).softmax(1); return y"),
    "r(3, 4), torch.randn(3, 4).half()": ("a + b", "a * b.float()", "torch.where(a > 0, a, b)", "torch.maximum(a, b)", "a.addcmul(a, b.float())", "torch.mul(b, 2.5), b / 3", "b.sum() + a"),
}  # fmt: skip
SCALARS: Table = {
    "r(3, 4), 3": ("a * b", "a + b, a ** b", "a.sum() * b", "a[:b]", "a.view(b, -1) * b"),
    "r(3, 4), 2.5": ("a * b", "a.clamp(-b, b)", "torch.full_like(a, b) + a", "a.add(a, alpha=b)"),
    "r(3, 4), True": ("a * b", "a.relu() if b else a"),
    "[r(3, 4), r(3, 4)]": ("a[0] + a[1]", "torch.cat(a), torch.stack(a).sum(0)"),
    "{'x': r(3, 4), 'y': 2}": ("a['x'] * a['y']", "{'z': a['x'].relu(), 'n': a['y']}"),
    "r(3, 4), None": ("a * 2 if b is None else b", "(a, b)"),
}  # fmt: skip
RANDOM: Table = {
    "r(6, 7)": ("F.dropout(a, 0.5, True) * 2", "torch.rand_like(a) + a", "torch.randn(6, 7) * a", "torch.bernoulli(a.sigmoid())", "F.dropout(a.relu(), 0.3) + F.dropout(a, 0.3)", "torch.randint(0, 5, (6, 7)) + a", "F.alpha_dropout(a, 0.2, True)", "torch.randperm(6).sum() + a", "a + torch.randn_like(a) * 0.1", "F.rrelu(a, training=True)", "a.clone().uniform_() + a", "F.gumbel_softmax(a, 1.0)", "F.dropout(a, 0.0, True), F.dropout(a, 1.0, True)", "torch.multinomial(a.softmax(1), 2)", "F.feature_alpha_dropout(a, 0.3, True)"),
    "r(2, 6, 5, 5) @ nn.Dropout2d(0.5)": ("m(a)", "m(a).relu() * 2"),
    "r(2, 6) @ nn.Dropout(0.5)": ("m(a)", "m(m(a) + 1)"),
}  # fmt: skip

CASES = tuple(each for table in (WHOLE, MIXED, SCALARS, RANDOM) for each in cases("kinds", table))
