"""Expressions and statements that random models are made of.

`{x}` and `{y}` are values, `{v}` one that is written to; `{i}` and `{j}` are dimensions, `{d}` several, `{k}` may ask to
keep them; `{at}` and `{length}` lie within dimension `{i}`.
"""

from __future__ import annotations

SMOOTH = (
    "F.gelu({x})", "F.gelu({x}, approximate='tanh')", "F.silu({x})", "torch.tanh({x})", "torch.sigmoid({x})",
    "F.mish({x})", "F.softplus({x})", "F.softplus({x}, beta=2, threshold=3)", "F.elu({x})", "F.celu({x}, 0.7)", "F.selu({x})",
    "F.softsign({x})", "F.logsigmoid({x})", "torch.sin({x})", "torch.cos({x})", "torch.exp(-{x}.abs())",
    "torch.log1p({x}.abs())", "torch.sqrt({x}.abs() + 0.5)", "torch.rsqrt({x} * {x} + 1)", "torch.erf({x})", "torch.atan({x})",
    "{x} ** 2", "{x}.pow(3) * 0.1", "({x}.abs() + 0.1) ** 0.5", "2 ** {x}.clamp(-3, 3)", "torch.addcmul({x}, {x}, {x}, value=0.3)",
    "torch.addcdiv({x}, {x}, {x} * {x} + 1, value=-0.5)", "torch.lerp({x}, {x} * 2, 0.3)", "1 / ({x}.abs() + 1)", "1 - {x}", "-{x}",
    "torch.tanh({x}).square()", "F.hardtanh({x})", "F.tanhshrink({x})", "torch.expm1({x}.clamp(max=1))", "torch.asinh({x})",
    "torch.hypot({x}, torch.ones_like({x}))", "torch.arctan2({x}, {x}.abs() + 1)", "{x}.reciprocal().clamp(-1, 1)", "torch.special.expit({x})",
    "torch.logaddexp({x}, -{x})", "torch.sinc({x})", "torch.erfc({x})", "torch.log2({x}.abs() + 1)", "torch.sinh({x}.clamp(-2, 2))",
)  # fmt: skip
"""Functions whose result moves as little as their argument."""

KINKED = (
    "F.relu({x})", "F.relu6({x})", "F.leaky_relu({x}, 0.2)", "F.hardswish({x})", "F.hardsigmoid({x})", "{x}.clamp(-0.5, 1.5)",
    "{x}.clamp(min=0.25)", "{x}.abs()", "torch.where({x} > 0, {x}, {x} * 0.1)", "{x}.masked_fill({x} < 0, 0.0)",
    "torch.maximum({x}, torch.zeros_like({x}))", "torch.minimum({x}, {x} * 0.5)", "{x} * ({x} > 0)", "F.softshrink({x}, 0.0)",
    "torch.nan_to_num({x})", "F.prelu({x}, torch.full((1,), 0.1, dtype={x}.dtype, device={x}.device))", "torch.where({x}.isnan(), 0.0, {x})",
    "torch.fmax({x}, {x} * 2)", "torch.clamp({x}, {x}.mean(), None)",
)  # fmt: skip
"""Piecewise functions without jumps."""

JUMPING = (
    "torch.round({x})", "torch.floor({x} * 2)", "torch.sign({x})", "({x} > 0).to({x}.dtype)", "F.hardshrink({x}, 0.5)",
    "F.threshold({x}, 0.1, -1.0)", "torch.trunc({x})", "{x} % 0.7", "torch.remainder({x}, 1.3)", "torch.fmod({x}, 0.9)", "{x} // 0.5",
    "torch.where(({x} > 0.2) & ({x} < 0.9), {x}, -1.0)", "{x}.frac()", "torch.heaviside({x}, {x})", "torch.signbit({x}).to({x}.dtype)",
    "({x} * 10).to(torch.int32).to({x}.dtype)", "torch.floor_divide({x}, 0.3)", "torch.ceil({x})",
)  # fmt: skip
"""Functions with jumps: only for inputs, which are the same bits in every run."""

ALONG = (
    "{x} - {x}.mean({d}, keepdim=True)", "{x} / (1 + {x}.abs().amax({d}, keepdim=True))", "F.softmax({x}, {i})", "F.log_softmax({x}, {i})",
    "{x} * torch.rsqrt({x}.pow(2).mean({d}, keepdim=True) + 1e-2)", "{x} + {x}.sum({d}, keepdim=True) * 0.1 - {x}.amin({d}, keepdim=True)",
    "({x} - {x}.mean({d}, True)) / ({x}.var({d}, correction=0, keepdim=True) + 0.5).sqrt()", "F.normalize({x}, dim={i}, eps=0.1)",
    "F.softmin({x}, {i})", "{x} - {x}.logsumexp({d}, keepdim=True)", "{x} * {x}.sigmoid().mean({d}, True)", "{x}.softmax({i}).mul(2).softmax({i})",
    "{x} - {x}.norm(dim={i}, keepdim=True) * 0.1",
)  # fmt: skip
REDUCTIONS = (
    "{x}.sum({d}{k}) * 0.1", "{x}.mean({d}{k})", "{x}.amax({d}{k})", "{x}.amin({d}{k})", "torch.logsumexp({x}, {d}{k})",
    "{x}.var({d}, correction=0{k})", "({x}.var({d}, correction=0{k}) + 1).sqrt()", "torch.linalg.vector_norm({x}, 2, {d}{k})",
    "{x}.max({i}{k}).values", "{x}.min({i}{k})[0]", "{x}.abs().sum({d}{k}).log1p()", "torch.var_mean({x}, {d}, correction=0{k})[1]",
    "{x}.clamp(0.5, 1.1).prod({i}{k})", "{x}.norm(1, {d}{k}) * 0.1", "{x}.sum({i}{k}, dtype=torch.float64).to({x}.dtype) * 0.1",
    "({x}.var({d}, correction=1{k}) + 1).sqrt() if {x}.numel() > 64 else {x}", "{x}.nansum({d}{k}) * 0.1", "torch.linalg.vector_norm({x}, float('inf'), {d}{k})", "torch.linalg.vector_norm({x}, 3, {d}{k})", "{x}.aminmax(dim={i}{k}).max", "{x}.softmax({i}, dtype=torch.float64).to({x}.dtype)", "{x}.square().sum({d}{k}).sqrt()",
    "{x}.sum_to_size({x}.shape[-1])", "torch.std_mean({x}, {d}, correction=0{k})[1]", "({x}.clamp(-0.5, 0.5) + 1).log().sum({d}{k}).exp().clamp(max=3)", "{x}.mean({d}{k}, dtype=torch.float64).to({x}.dtype)", "{x}.abs().amax({d}{k}).clamp(min=0.5).reciprocal()", "{x}.nanmean({d}{k})",
)  # fmt: skip
WHOLE = ("{x}.sum() * 0.01", "{x}.mean()", "{x}.max()", "{x}.amin()", "{x}.norm() * 0.1")
VIEWS = (
    "{x}.transpose({i}, {j})", "{x}.flip({i})", "{x}.flatten()", "{x}.narrow({i}, {at}, {length})", "torch.roll({x}, {at}, {i})",
    "torch.cat([{x}, {x} * 2], {i})", "torch.cat([{x}.tanh(), {x}, {x}.relu()], {i})", "torch.stack([{x}, -{x}], {i})", "{x}.unsqueeze({i})",
    "{x}.select({i}, {at})", "F.pad({x}, (1, 2), value=0.5)", "F.pad({x}, (0, -1)) if {x}.shape[-1] > 1 else {x}", "{x}.reshape({x}.shape[0], -1)",
    "{x}.unflatten({i}, (1, -1))", "{x}.chunk(2, {i})[0]", "{x}.chunk(2, {i})[-1]", "{x}[..., ::2]", "{x}[{at} if {i} == 0 else 0]", "{x}.unsqueeze(0).expand(2, *{x}.shape)",
    "{x}.movedim({i}, {j})", "{x}.contiguous()", "{x}.mT if {x}.dim() > 1 else {x}", "{x}.repeat_interleave(2, {i})", "{x}.repeat(*[2] * {x}.dim())", "{x}.tril() if {x}.dim() > 1 else {x}",
    "{x}.diagonal(0, {i}, {j}) if {i} != {j} else {x}", "{x}.unfold({i}, 1, 1)", "{x}.split(1, {i})[0]", "{x}.squeeze()", "{x}.clone()",
    "{x}.swapaxes({i}, {j}).flatten()", "F.pad({x}, (1, 0)).unflatten(-1, (-1, {x}.shape[-1] + 1))", "{x}.unbind({i})[-1]", "{x}.new_zeros({x}.shape) + {x}",
    "{x}.movedim({i}, -1).contiguous()", "{x}[..., 1::3]", "{x}[None]", "{x}.triu(1) if {x}.dim() > 1 else {x}", "{x}.rot90(1, ({i}, {j})) if {i} != {j} else {x}", "{x}.tile(2)", "torch.hstack([{x}, {x}])", "{x}.tensor_split(2, {i})[0]",
    "{x}.as_strided(({x}.numel(),), (0,))", "{x}.contiguous().as_strided((3, max({x}.numel() - 2, 0)), (1, 1))", "{x}.flatten().as_strided((max({x}.numel() // 2, 0), 2), (2, 1))", "{x}.index_select({i}, torch.tensor([{at}, 0, {at}], device={x}.device))",
    "{x}.select_scatter({x}.select({i}, {at}) * 2, {i}, {at})", "{x}.slice_scatter({x}.narrow({i}, {at}, {length}) * 0, {i}, {at}, {at} + {length})", "torch.diag({x}[:99]) if {x}.dim() in (1, 2) else {x}", "{x}.expand(3, *{x}.shape).movedim(0, {i})",
    "{x}.contiguous(memory_format=torch.channels_last) if {x}.dim() == 4 else {x}", "{x}.view({x}.shape)", "{x}.unsqueeze({i}).transpose({i}, 0)", "{x}.broadcast_to(2, *{x}.shape)", "{x}.flip(0, -1)", "{x}.diagonal_scatter({x}.diagonal(0, {i}, {j}) * 2, 0, {i}, {j}) if {i} != {j} else {x}",
)  # fmt: skip
IN_PLACE = (
    "{v}.add_(1)", "{v}.mul_(0.5)", "{v}.relu_()", "{v}.sigmoid_()", "{v}.clamp_(-1, 1)", "F.relu({v}, inplace=True)", "{v}.neg_()",
    "{v}[..., 0] = 0.5", "{v}[..., :1].mul_(2)", "{v}.fill_(0.3)", "{v}.masked_fill_({v} > 0, 0.1)", "{v}.add_({v})", "{v}.copy_({v}.flip(0)) if {v}.dim() else {v}",
    "{v}.view(-1).add_(0.1) if {v}.is_contiguous() else {v}", "{v} += 1", "{v} *= {v}.abs().amax()", "{v}.transpose(0, -1).mul_(0.3) if {v}.dim() else {v}",
)  # fmt: skip
BINARY = (
    "{x} + {y}", "{x} * {y}", "{x} - 0.5 * {y}", "{x} / ({y}.abs() + 1)", "torch.maximum({x}, {y})", "torch.where({x} > {y}, {x}, {y})",
    "{x} * {y}.sigmoid()", "torch.add({x}, {y}, alpha=0.3)", "torch.lerp({x}, {y}, 0.25)", "torch.addcmul({x}, {y}, {y}, value=0.2)",
    "torch.hypot({x}, {y})", "torch.logaddexp({x}, {y})", "torch.rsub({x}, {y}, alpha=2)", "torch.sub({x}, {y}).square()", "torch.arctan2({x}, {y}.abs() + 1)",
)  # fmt: skip

ALGEBRA = (
    "{x} * 2 * 0.25 + 1 - 0.5", "1 - (2 - {x}) * 3", "(-{x}) * (-{x})", "{x} - (-{x})", "torch.sigmoid({x}).clamp(0, 1)", "F.relu(torch.softmax({x}, -1))",
    "F.relu6({x}).clamp(0, 7)", "{x}.clamp(-1, 1).clamp(min=0)", "torch.exp(-F.relu({x})).clamp(max=2)", "F.relu({x}).abs()", "torch.maximum({x}.tanh(), {x}.tanh())",
    "(-{x}).abs()", "(-{x}) ** 2", "torch.sigmoid({x}).amax({d}{k})", "(1 - {x}).amax({d}{k})", "({x} * 3 + 1).amin({d}{k})", "({x} * 0.1).sum({d}{k})", "(-{x}).mean({d}{k})",
    "({x} * {x}.mean({d}, keepdim=True).sigmoid()).sum({d}, keepdim=True) * 0.1", "{x}.unsqueeze({i}).expand(2, *[-1] * ({x}.dim() + 1)).sum(0) * 0.5",
    "F.gelu({x}.unsqueeze(0).expand(3, *{x}.shape)).mean(0)", "{x}.unsqueeze(-1).softmax(-1)", "{x}.unsqueeze(-1).logsumexp(-1)", "{x}.unsqueeze({i}).sum({i})",
    "{x}.unsqueeze(0).var(0, correction=0)", "{x}.unsqueeze(-1).log_softmax(-1).squeeze(-1)", "{x}.sum({d}, keepdim=True).sum({i}{k}) * 0.1", "{x}.mean({d}, keepdim=True).mean({i}{k})",
    "{x}.t().contiguous().sum(0) * 0.1 if {x}.dim() == 2 else {x}", "({x} - {x}) + {x}", "{x} / {x}.abs().clamp(min=0.5) * 1", "({x}.square() + 0.1).sqrt().square()", "torch.ones_like({x}) - {x} * torch.full_like({x}, 2)",
    "{x} * (torch.tensor(2.0, dtype=torch.float64) * 3).exp() * 0.01", "{x} / {x}.new_full({x}.shape, 4.0).sqrt() + {x}.new_zeros(1)", "torch.sigmoid({x}).max({i}{k}).values",
)  # fmt: skip
"""What the rules of `fusepass.patterns.rules` are about."""

ODD = (
    "F.dropout({x}, 0.3, training=False)", "{x} + torch.tensor(0.5)", "{x} * torch.tensor(3)", "torch.zeros_like({x}) + {x}",
    "{x} + torch.arange({x}.shape[-1], device={x}.device).to({x}.dtype) * 0.1", "{x} * {x}.shape[0]", "{x} + torch.full({x}.shape, 0.2, dtype={x}.dtype, device={x}.device)", "{x}.double().to({x}.dtype)",
    "{x} + torch.ones(1, dtype={x}.dtype, device={x}.device)", "{x} + True", "{x}.type_as({x})", "torch.ones({x}.shape, dtype={x}.dtype, device={x}.device) - {x}", "{x} + torch.linspace(0, 1, {x}.shape[-1], dtype={x}.dtype, device={x}.device)",
    "{x} * torch.tensor(0.5, dtype=torch.float64)", "torch.einsum('...i,...i->...', {x}, {x}) * 0.1",
    "{x}.masked_fill(torch.ones({x}.shape[-2:], dtype=torch.bool, device={x}.device).triu(1), float('-inf')).softmax(-1)", "torch.where(torch.arange({x}.shape[-1], device={x}.device) % 2 == 0, {x}, 0.0)",
    "F.scaled_dot_product_attention({x}, {x}, {x}) if {x}.dim() == 4 and {x}.numel() else {x}", "F.glu(torch.cat([{x}, {x}], -1), -1)",
    "F.cosine_similarity({x}, {x} * 2 + 1, dim=-1)", "F.mse_loss({x}, {x} * 0.5)", "F.smooth_l1_loss({x}, {x} * 0.5, reduction='none')", "F.kl_div(({x} * 0.5).log_softmax(-1), {x}.softmax(-1), reduction='none')",
    "{x}.cumsum(-1) * 0.1", "{x}.flip(0).cumsum(0).flip(0) * 0.1", "{x}.sigmoid().cumprod(-1)", "{x}.sort(-1).values", "{x}.gather(-1, torch.zeros({x}.shape, dtype=torch.int64, device={x}.device))", "{x}.index_select(-1, torch.tensor([0], device={x}.device))", "F.local_response_norm({x}, 2) if {x}.dim() > 2 else {x}",
    "{x}.abs().amax(-1).to(torch.float64).to({x}.dtype)", "{x}.std(-1) if {x}.shape[-1] > 1 else {x}", "{x}.mean(dtype=torch.float64).to({x}.dtype)",
    "torch.meshgrid({x}.flatten()[:3], {x}.flatten()[:2], indexing='ij')[0]", "torch.outer({x}.flatten()[:5], {x}.flatten()[:7])", "{x}.as_strided({x}.shape, {x}.stride())",
    "torch.clamp({x}, min=torch.zeros((), dtype={x}.dtype, device={x}.device))", "{x}.real", "torch.complex({x}, {x}).abs() if {x}.dtype.itemsize > 2 else {x}",
)  # fmt: skip
"""What models do beside layers."""

SQUARES = (
    "{x} + torch.eye({x}.shape[-1], dtype={x}.dtype, device={x}.device)", "F.one_hot(torch.arange({x}.shape[-1], device={x}.device)).to({x}.dtype) + {x}.unsqueeze(-1)",
    "F.bilinear({x}, {x}, torch.full((2, {x}.shape[-1], {x}.shape[-1]), 0.1, dtype={x}.dtype, device={x}.device))",
)  # fmt: skip
"""Of matrices as wide and as high as the last dimension is long."""

WHOLE_NUMBERS = (
    "({x} > 0).sum(-1).to({x}.dtype) * 0.1", "({x} * 4).to(torch.int64).sum(0).to({x}.dtype) * 0.1", "({x} > 0.3).any(-1).to({x}.dtype)", "({x} > -0.3).all(0).to({x}.dtype)",
    "{x}.argmax(-1).to({x}.dtype) * 0.1", "(({x} * 8).to(torch.int32) & 3).to({x}.dtype)", "(({x} * 8).to(torch.int16) // 3).to({x}.dtype)", "(({x} * 8).to(torch.int64) % 3).to({x}.dtype)",
    "(({x} * 8).to(torch.int8) * 2).to({x}.dtype)", "(~({x} > 0)).to({x}.dtype)", "(({x} > 0) ^ ({x} > 1)).to({x}.dtype)", "({x} == {x}.round()).to({x}.dtype)", "(({x} * 8).to(torch.int32) >> 1).to({x}.dtype)",
    "{x}.bool().to({x}.dtype)", "({x} * 3).to(torch.int64).to({x}.dtype) + {x}", "({x} * 3).abs().to(torch.uint8).amax(-1).to({x}.dtype)", "({x} > 0).to(torch.int32).cumsum(-1).to({x}.dtype)", "torch.div(({x} * 9).to(torch.int64), 2, rounding_mode='trunc').to({x}.dtype)",
    "({x} * 9).to(torch.int64)", "{x} > 0.25", "({x} * 5).to(torch.int32).amax(0)", "({x} > 0).sum(0)", "{x}.argmin(0, keepdim=True)", "({x} * 5).to(torch.int8).sum(-1)", "({x} > 0).prod(-1)",
)  # fmt: skip
"""Integers and booleans made of an input, and floats of them."""

INTEGERS = (
    "{x} + 1", "{x} * 3 - {x}", "{x} // 3", "{x} % 4", "-{x}", "~{x}", "{x} ^ 5", "{x} | 2", "{x} & 6", "({x} & 7) << 1", "{x} >> 1", "{x}.abs()",
    "{x}.clamp(-3, 5)", "{x}.clamp(max=2)", "torch.where({x} > 2, {x}, 0)", "torch.where({x} != 0, {x}, 0.5).to(x0.dtype)", "({x} + 0.5).to(x0.dtype)", "{x} * True", "({x} / 4).to(x0.dtype)",
    "({x} & 3) ** 2", "torch.maximum({x}, {x} // 2)", "{x}.sign()", "{x}.bool()", "({x} & 63).to(torch.uint8)", "({x} & 7).to(torch.int16) * 300", "({x} & 3).to(torch.int8) * 50", "{x} > 1", "{x} == {x}.flip(-1)",
    "{x}.to(x0.dtype) * 0.1", "{x}.to(x0.dtype).sigmoid()", "torch.sqrt({x}.abs()).to(x0.dtype)", "{x}.sum({d}{k})", "{x}.amax({d}{k})", "{x}.amin({d}{k})", "{x}.any({i}{k})", "{x}.all({i}{k})", "{x}.all()", "{x}.sum()",
    "({x} & 1).prod({i}{k})", "{x}.argmax({i}{k})", "{x}.max({i}{k}).indices", "{x}.min({i}{k}).values", "{x}.to(x0.dtype).mean({d}{k})", "{x}.count_nonzero({i})", "{x}.cumsum({i})", "torch.remainder({x}, -3)", "torch.fmod({x}, -3)",
    "torch.div({x}, -3, rounding_mode='floor')", "torch.div({x}, 4, rounding_mode='trunc')", "torch.logical_xor({x}, {x} > 1)", "torch.logical_not({x})", "torch.logical_or({x} > 2, {x} < -1)", "F.one_hot({x}.long().clamp(0, 4), 5)",
    "torch.rsub({x}, 3)", "torch.add({x}, {x}, alpha=2)", "{x}.square()", "{x}.masked_fill({x} > 1, 0)", "{x} * torch.tensor(2)", "{x} * torch.tensor(2, dtype=torch.uint8)", "{x} - torch.tensor([1], device={x}.device)", "{x}.clone()", "{x}.bitwise_not()", "{x}.type(torch.int64)",
    "{x}.float().to(x0.dtype)", "x0.flatten()[({x}.flatten()[:9].long() % max(x0.numel(), 1)).abs()]", "F.embedding({x}.long().abs() % 4, torch.linspace(-1, 1, 12, dtype=x0.dtype, device=x0.device).view(4, 3))",
    "{x}.take_along_dim({x}.argmax({i}, keepdim=True), {i})", "{x}.roll(1, {i})", "torch.bincount({x}.flatten().long().clamp(0, 3), minlength=4)",
)  # fmt: skip
"""Of integers and truths; `x0` is the first input, a floating-point one."""

PAIRS_OF_INTEGERS = (
    "{x} + {y}", "{x} * {y}", "{x} & {y}", "{x} | {y}", "{x} ^ {y}", "torch.where({x} > {y}, {x}, {y})", "torch.maximum({x}, {y})", "{x} == {y}", "{x} <= {y}", "{x} // ({y}.abs() + 1)", "{x} % ({y}.abs() + 1)",
    "({x} / ({y}.abs() + 1)).to(x0.dtype)", "{x} << ({y} & 3)", "{x} >> ({y} & 3)", "torch.logical_and({x}, {y})", "torch.minimum({x}, {y}).sum(-1)", "torch.add({x}, {y}, alpha=3)", "torch.cat([{x}.flatten(), {y}.flatten()])",
)  # fmt: skip

MIXED = (
    "{x} + {y}", "{x} * {y}", "{x} - {y}", "{x} / ({y}.abs() + 1)", "torch.maximum({x}, {y})", "torch.where({y} > 0, {x}, {y})", "torch.where({y} > 0, {x}, 0.25)", "{x} * ({y} > 0)", "torch.add({x}, {y}, alpha=2)", "({x} + {y}).to({x}.dtype)",
    "{x} * {y}.sum()", "{x}.masked_fill({y} > 0, 0.5)", "torch.stack([{x} + {y} * 0, {y} + {x} * 0])", "torch.cat([{x}.flatten(), {y}.flatten()])", "{x}.clamp({y} * 0, {y} * 0 + 2)", "torch.hypot({x} * 1.0, {y} * 1.0)", "{x} + {y}.to({x}.dtype)", "{y} - {x}", "{y} / ({x}.abs() + 1)", "torch.where({y} > 0, {y}, {x})",
    "torch.lerp({x} * 1.0, {x} * 2.0, {y}.to(({x} * 1.0).dtype))", "torch.addcmul({x}, {x}, {y}, value=2)", "F.mse_loss({x} * 1.0, {y} * 1.0, reduction='none')",
)  # fmt: skip
"""Of two types; the second value is an input, or of integers."""

AUTOCAST = (
    "({x} @ {x}.mT * 0.1).softmax(-1)", "F.gelu({x}).sum(-1)", "F.linear({x}, {x}.new_ones(3, {x}.shape[-1]) * 0.1)", "F.layer_norm(({x} @ {x}.mT) * 0.1, ({x}.shape[-2],), eps=1e-1)", "{x}.softmax(-1) @ {x}.mT", "F.relu({x} @ {x}.mT * 0.1) + {x}.sum(-1, keepdim=True) * 0.1",
    "torch.tanh({x}) * 2", "({x} @ {x}.mT * 0.1).exp().clamp(max=3)", "F.mse_loss({x} * 0.5, {x})", "torch.cat([{x} @ {x}.mT * 0.1, {x} @ {x}.mT * 0.2], -1)", "({x} @ {x}.mT * 0.1).log_softmax(-1)", "{x}.pow(2).mean(-1)", "torch.bmm({x}, {x}.mT) * 0.1 if {x}.dim() == 3 else {x}",
)  # fmt: skip
"""What autocast runs in bfloat16 with what it runs in float32."""

RANDOM = (
    "F.dropout(torch.ones({x}.shape, device={x}.device), 0.4).to({x}.dtype) * {x}", "{x} + torch.rand({x}.shape, device={x}.device).to({x}.dtype) * 0.1", "{x} * torch.bernoulli(torch.full({x}.shape, 0.5, device={x}.device)).to({x}.dtype)",
    "{x} * torch.randint(0, 3, {x}.shape, device={x}.device).to({x}.dtype)", "{x}[..., torch.randperm({x}.shape[-1], device={x}.device)] if {x}.dim() else {x}", "F.dropout({x}, 0.3) if {x}.device.type == 'cpu' else {x}",
    "F.dropout({x}.relu(), 0.5) * 2 + {x} if {x}.device.type == 'cpu' else {x}", "{x} + torch.empty({x}.shape, device={x}.device).uniform_(-1, 1).to({x}.dtype)", "F.alpha_dropout({x}.float(), 0.2, training=True).to({x}.dtype) if {x}.device.type == 'cpu' else {x}",
)  # fmt: skip
"""What draws random numbers, the same ones in every type: a GPU's dropout draws by the type.

What alpha dropout adds has two values, whose roundings in halves would add up in a sum.
"""

BRANCHES = (
    "{x} * 2 if bool({e}.flatten()[0] > 0) else {x} - 1", "{x}.relu() if {e}.flatten()[0] > 0.5 else {x}.tanh() * 2", "{x} + 1 if ({e} > 0).any() else {x} * 3", "{x} * (1 + int({e}.flatten()[0] > 0))",
)  # fmt: skip

HELD = (
    "{x} * {p}", "{x} + {p}", "{p} - {x}", "torch.where({p} > 0, {x}, {p})", "F.relu({x} + {p}) * {p}", "torch.maximum({x}, {p})", "{x} + {p}.mean()", "torch.lerp({x}, {p} + {x} * 0, 0.3)", "({x} * {p}).sum(-1)", "{p}.expand({x}.shape)", "{p} * 2",
)  # fmt: skip
"""With a parameter or a buffer of the model."""

WRITTEN = (
    "{p}.mul_(0.5)", "{p}.add_({x}.mean())", "{p}.lerp_({p} * 0 + 1, 0.1)", "{p}.copy_({p}.flip(0)) if {p}.dim() else {p}.neg_()", "{p} += 1", "{p}.fill_(0.25)", "{p}.clamp_(min=0)", "{p}[...] = {p} * 0.5", "{p}.zero_().add_({x}.amax())",
)  # fmt: skip
"""Statements that change a buffer."""

SHARED = (
    "F.linear({x}, {p}.weight)", "{x} @ {p}.weight", "{x} * {p}.weight.mean()", "{x} + {p}.bias", "{x} * {p}.weight.flatten()[:1]", "F.relu({x} + {p}.weight.sum())", "F.linear({x}, {p}.weight, {p}.bias) * 2", "{x} * {p}.weight.abs().amax()",
)  # fmt: skip
"""With the parameters of a layer."""
