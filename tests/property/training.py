"""Random models to be trained: besides what all have, what has gradients of its own: extremes, losses, pools, gathers, scans, writes."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from hypothesis import strategies as st

from tests.property import random_models
from tests.property.script import Model
from tests.property.steps import Sketch, fill

EXTREMES = (
    "{x}.amax({d}{k})", "{x}.tanh().amax({d}{k})", "F.gelu({x}).amin({d}{k})", "({x} * 1.1 + {x} * {x}).amax({d}{k})", "{x}.aminmax(dim={i}{k}).min", "{x}.max({i}{k}).values", "{x}.exp().clamp(max=9).min({i}{k}).values",
    "torch.where({x} == {x}.amax({d}, keepdim=True), {x} * 2, {x} * 0.1)", "{x} * ({x}.sigmoid() == {x}.sigmoid().amin({d}, keepdim=True))", "torch.linalg.vector_norm({x}, float('inf'), {d}{k})", "F.silu({x}).norm(float('-inf'), {i}{k})",
    "{x}.cummax({i}).values", "{x}.cummin({i}).values", "{x}.sort({i}).values", "{x}.topk(1, {i}).values", "{x}.kthvalue(1, {i}{k}).values", "{x}.median({i}{k}).values", "{x}.max()", "{x}.erf().amax()", "{x}.logcumsumexp({i})", "torch.maximum({x}, {x}.flip({i}))", "{x}.abs().amax({d}, keepdim=True) - {x}",
)  # fmt: skip
LOSSES = (
    "F.mse_loss({x}, {x}.detach() * 0.5, reduction='none')", "F.mse_loss({x}, {x}.sigmoid())", "F.l1_loss({x}, {x}.mean({d}, keepdim=True).expand_as({x}))", "F.smooth_l1_loss({x}, {x}.flip({i}), beta=0.3)", "F.huber_loss({x}, {x} * 0.3, delta=0.4, reduction='sum') * 0.01", "F.cross_entropy({x}.flatten(1), torch.arange({x}.shape[0]) % {x}[0].numel()) if {x}.dim() > 1 else {x}", "F.cross_entropy({x}.flatten(1), {x}.flatten(1).detach().softmax(1), label_smoothing=0.1) if {x}.dim() > 1 else {x}",
    "F.nll_loss({x}.flatten(1).log_softmax(1), torch.arange({x}.shape[0]) % {x}[0].numel(), reduction='none') if {x}.dim() > 1 else {x}", "F.binary_cross_entropy_with_logits({x}, {x}.detach().sigmoid())", "F.binary_cross_entropy({x}.sigmoid() * 0.8 + 0.1, {x}.detach().sigmoid(), reduction='none')", "F.kl_div({x}.log_softmax({i}), {x}.detach().softmax({i}), reduction='batchmean')", "F.soft_margin_loss({x}, {x}.detach().sign())", "F.cosine_similarity({x}, {x}.flip({i}) + 1, dim={i})", "F.gaussian_nll_loss({x}, {x} * 0.5, {x}.abs() + 0.5)", "F.poisson_nll_loss({x}.clamp(max=2), {x}.abs().detach())",
    "F.triplet_margin_loss({x}, {x} * 0.5, {x} + 1)", "-({x}.softmax({i}) * {x}.log_softmax({i})).sum({i})", "({x} - {x}.mean({d}, keepdim=True)).pow(2).mean({d}{k})",
)  # fmt: skip
PLACES = (
    "{x}[torch.tensor([0, {x}.shape[0] - 1, 0])]", "{x}.index_select({i}, torch.tensor([{at}, {at}, 0]))", "{x}.gather({i}, torch.zeros({x}.shape, dtype=torch.int64))", "{x}.scatter_add({i}, torch.zeros({x}.shape, dtype=torch.int64), {x} * 0.5)", "{x}.index_add({i}, torch.tensor([{at}]), {x}.narrow({i}, 0, 1))", "F.embedding(torch.tensor([0, {x}.shape[0] - 1, 0]), {x}) if {x}.dim() == 2 else {x}", "{x}.masked_fill({x} > 0.3, 0.5)", "{x}.index_fill({i}, torch.tensor([{at}]), 0.3)", "{x}.index_copy({i}, torch.tensor([{at}]), {x}.narrow({i}, 0, 1) * 2)", "{x}.take(torch.tensor([0, {x}.numel() - 1, 0]))",
    "{x}.cumsum({i}) * 0.1", "{x}.sigmoid().cumprod({i})", "{x}.flip({i}).cumsum({i}).flip({i}) * 0.1", "{x}.cumsum({i}).tanh()", "{x}.diff(dim={i})", "{x}.detach() * {x}", "{x}.detach().mean({d}, keepdim=True) + {x}", "F.linear({x}, torch.full((1, {x}.shape[-1]), 0.3, dtype={x}.dtype))", "F.linear(F.gelu({x}), torch.full((1, {x}.shape[-1]), 0.3, dtype={x}.dtype)).squeeze(-1)", "{x}.clone().mul_(2)", "{x}.mul(2).t_() if {x}.dim() == 2 else {x}", "{x}.expand(3, *{x}.shape).sum(0)",
)  # fmt: skip
POOLS = (
    "F.max_pool2d({x}, 2)", "F.max_pool2d({x}, 3, 1, 1)", "F.max_pool2d({x}.tanh(), 3, 2, 1, ceil_mode=True)", "F.avg_pool2d({x}, 3, 2, 1, count_include_pad=False)", "F.adaptive_avg_pool2d({x}, (1, 2))", "F.adaptive_max_pool2d({x}, 2)", "F.max_pool2d({x}, 2, return_indices=True)[0]", "F.interpolate({x}, scale_factor=2, mode='bilinear')", "F.lp_pool2d({x}, 2, 2)", "F.pad({x}, (1, 1, 1, 1), mode='reflect')", "F.pad({x}, (1, 0, 2, 1), mode='replicate')", "F.unfold({x}, 2)", "F.grid_sample({x}, torch.linspace(-1, 1, 24, dtype={x}.dtype).view(1, 3, 4, 2).expand({x}.shape[0], 3, 4, 2))",
)  # fmt: skip
TIES = (
    "{x}.relu().amax({d}{k})", "{x}.clamp(-0.3, 0.3).amin({d}{k})", "torch.cat([{x}, {x}], {i}).amax({i}{k})", "torch.cat([{x}, {x}], {i}).max({i}{k}).values", "{x}.expand(2, *{x}.shape).amax(0)", "torch.maximum({x}, {x}.clone())", "torch.minimum({x}.relu(), {x} * 0)", "torch.fmin({x}, {x}.relu())", "{x}.repeat_interleave(2, {i}).aminmax(dim={i}{k}).max",
    "{x}.relu().max()", "torch.cat([{x}, {x}], {i}).median({i}{k}).values", "torch.cat([{x}, {x}], {i}).cummax({i}).values", "torch.cat([{x}, {x}], {i}).sort(dim={i}, stable=True).values", "torch.linalg.vector_norm(torch.cat([{x}, -{x}], {i}), float('inf'), {d}{k})", "{x}.clamp({x}.amin(), {x}.amax())", "{x}.relu().argmax({i}{k}).to({x}.dtype) * 0.1 + {x}.sum({i}{k}) * 0.1", "F.max_pool1d({x}.relu(), 2) if {x}.dim() in (2, 3) else {x}",
    "F.hardtanh({x}.clamp(-1, 1))", "{x}.relu().abs() - {x}.clamp(max=0).sign()", "{x}.relu().prod({i}{k})", "{x}.relu().cumprod({i})", "torch.where({x}.relu() > 0, {x}.sqrt(), 0.0)", "{x}.relu().norm(dim={i}{k})",
)  # fmt: skip
WRITES = (
    "{x}.index_put((torch.tensor([0, 0, {x}.shape[0] - 1]),), {x}[:1].expand(3, *{x}.shape[1:]) * 0.5, accumulate=True)", "{x}.index_put((torch.tensor([{x}.shape[0] - 1]),), {x}[:1] * 2)", "{x}.scatter_reduce({i}, torch.zeros({x}.shape, dtype=torch.int64), {x} * 0.5, 'amax')", "{x}.scatter_reduce({i}, torch.zeros({x}.shape, dtype=torch.int64), {x} * 0.5, 'mean', include_self=False)", "{x}.scatter({i}, torch.zeros({x}.shape, dtype=torch.int64).narrow({i}, 0, 1), {x}.narrow({i}, 0, 1) * 0.5)", "{x}.index_reduce({i}, torch.tensor([{at}]), {x}.narrow({i}, 0, 1), 'amax')",
    "{x}.masked_scatter(torch.arange({x}.numel()).view({x}.shape) % 3 == 0, {x} * 2)", "{x}.put(torch.tensor([0, 0]), {x}.flatten()[:1].expand(2), accumulate=True)", "{x}.gather({i}, {x}.argmax({i}, keepdim=True))", "{x}.take_along_dim({x}.argsort({i}), {i})", "{x}[..., [0, -1, 0]]", "{x}[[0, -1]][:, None]", "torch.where({x} > 0, {x}, {x}.detach())", "F.embedding(torch.tensor([0, {x}.shape[0] - 1, 0]), {x}, padding_idx=0) if {x}.dim() == 2 else {x}",
    "F.embedding_bag(torch.tensor([[0, {x}.shape[0] - 1], [0, 0]]), {x}, mode='mean') if {x}.dim() == 2 else {x}", "F.embedding_bag(torch.tensor([0, {x}.shape[0] - 1, 0]), {x}, torch.tensor([0, 1]), mode='sum', padding_idx=0) if {x}.dim() == 2 else {x}", "F.embedding(torch.tensor([0, {x}.shape[0] - 1, 0]), {x}, scale_grad_by_freq=True) if {x}.dim() == 2 else {x}",
    "(lambda t: (t.narrow({i}, {at}, 1).mul_(2), t)[1])({x} * 1)", "(lambda t: (t.transpose({i}, {j})[:1].add_({x}.mean()), t.sin())[1])({x}.tanh() * 2)", "(lambda t: (t * 2, t.sigmoid_())[1])({x} * 1)", "(lambda t: (t + 1, t.mul_(2))[0] * t)({x} * 1)", "(lambda t, u: (t.mul_(u), t + u)[1])({x} * 1, {x}.tanh())", "(lambda t: (t.flatten().narrow(0, 0, 1).copy_({x}.sum() * 0.1), t)[1])({x}.contiguous() * 1)", "(lambda t: (t.select({i}, {at}).zero_(), t.unsqueeze({i}).exp())[1])({x}.clamp(-2, 2) * 1)", "(lambda t: (t.diagonal(0, {i}, {j}).fill_(0.5), t)[1] if {i} != {j} else t)({x} * 1)",
    "(lambda t: (t.exp(), t.add_(1))[0])({x}.clamp(-2, 2) * 1)", "(lambda t: t.mul_(2).add_({x}).relu_())({x} - 0.1)", "(lambda t, u: (u.add_(t), t.sin())[0] * u)({x} * 1, {x} * 2)",
)  # fmt: skip
"""Elements written at places, and in place: to views, and to what backward may have saved."""
VIEWED = (
    "{x}.transpose({i}, {j}).unsqueeze({i}).squeeze()", "{x}.flatten().unsqueeze(0).expand(3, -1)[1:].t()", "{x}.narrow({i}, {at}, 1).expand_as({x}) * {x}", "{x}.unfold({i}, 1, 1).squeeze(-1).movedim({j}, 0)", "{x}.movedim({i}, 0)[1:].movedim(0, {i}) if {x}.shape[{i}] > 1 else {x}", "{x}.split(1, {i})[-1].squeeze({i}).unsqueeze({j})", "{x}.unfold({i}, 2, 1).mean(-1) if {x}.shape[{i}] > 1 else {x}", "{x}.unsqueeze(0).expand(2, *{x}.shape).transpose(0, 1).flatten(0, 1)", "{x}.flatten()[::2].view(-1, 1)[..., 0]", "{x}.mT.contiguous().view(-1)[1:] if {x}.dim() > 1 and {x}.numel() > 1 else {x}",
    "torch.cat([{x}, {x}.narrow({i}, 0, 0)], {i})", "{x} + {x}.narrow({i}, 0, 0).sum()", "{x}.narrow({i}, 0, 0).sum({i}, keepdim=True) + {x}", "{x}.narrow({i}, 0, 0).prod() * {x}", "{x}.narrow({i}, 0, 1).softmax({i}) * {x}", "{x}.narrow({i}, 0, 1).var({i}, correction=0, keepdim=True) + {x}", "{x}.flatten()[0] * {x}", "{x}.sum().reshape(1, 1) * 0.1 * {x}", "{x}.flatten()[0].amax() + {x}", "{x}.mean().unsqueeze(0).cumsum(0) * {x}",
    "{x}.flatten()[-1].softmax(0) * {x}", "{x}.mean().log_softmax(0) + {x}", "{x}.narrow({i}, 0, 1).amax({i}, keepdim=True) - {x}", "{x}.flatten()[0].norm() + {x}", "{x} + ({x}.tanh() - {x}).detach()", "{x}.detach().argmax({i}{k})", "{x}.detach().tanh()", "{x}.float().sum({d}{k}).to({x}.dtype) * ({x}.detach() > 9).sum({d}{k})", "{x} * (torch.arange({x}.shape[-1]) % 2)", "{x}.masked_fill((torch.arange({x}.shape[{i}]) % 2 == 0).view(-1, *[1] * ({x}.dim() - {i} - 1)), 0.0)",
)  # fmt: skip
"""Views of views, dimensions of zero and one, values without dimensions, and what has no gradient."""
SUMS = (
    "{x}.var({d}, correction=1{k})", "{x}.var({d}, correction=2{k})", "torch.var_mean({x}, {d}, correction=1{k})[0]", "({x} + torch.arange({x}.numel(), dtype={x}.dtype).view({x}.shape) * 0.1).std({i}{k})", "({x}.abs() + 0.1).norm(0.5, {d}{k}) * 0.01", "torch.linalg.vector_norm({x}, 0, {d}{k}) * 0.1 + {x}.mean()", "torch.linalg.vector_norm({x}, 2.5, {d}{k})", "F.normalize({x}, p=1, dim={i}, eps=0.1)", "torch.linalg.matrix_norm({x}) if {x}.dim() > 1 else {x}", "torch.cdist({x}, {x} + 1) * 0.1 if {x}.dim() > 1 else {x}", "F.pairwise_distance({x}, {x} * 0.5 + 1)",
    "{x}.renorm(2, {i}, 1.0)", "({x} * 3).logsumexp({d}{k})", "{x}.logsumexp({i}) - {x}.amax({i})", "{x}.cumsum({i}).amax({i}{k}) * 0.1", "{x}.cumprod({i}).clamp(-5, 5)", "torch.cumulative_trapezoid({x}, dim={i}) * 0.1", "{x}.softmax({i}).cumsum({i})", "{x}.logcumsumexp({i}).flip({i})", "({x} * {x}.cumsum({i})).sum({d}{k}) * 0.01", "torch.einsum('...ij,...kj->...ik', {x}, {x}.tanh()) * 0.1", "torch.einsum('...ij,...ij->...', {x}, {x}.sin()) * 0.1", "torch.einsum('i...,i...->...', {x}, {x}) * 0.1", "{x} @ {x}[:1].mT * 0.1 if {x}.dim() == 3 else {x}",
    "torch.baddbmm({x} @ {x}.mT, {x}, {x}.mT, beta=0.1, alpha=0.1) if {x}.dim() == 3 else {x}", "torch.addmm({x}.mean(0), {x}, {x}.mT @ {x} * 0.01) if {x}.dim() == 2 else {x}", "({x}.unsqueeze(-2) @ {x}.unsqueeze(-1)).flatten(-2) * 0.1", "({x}.unsqueeze(-1) * {x}.unsqueeze(-2)).sum(-1) * 0.1 if {x}.shape[-1] < 17 else {x}", "F.layer_norm({x}, {x}.shape[-1:], {x}.flatten(0, -2).mean(0), eps=0.1) if {x}.dim() > 1 else {x}", "F.rms_norm({x}, {x}.shape[-1:], {x}.flatten(0, -2).mean(0), eps=0.1) if {x}.dim() > 1 else {x}", "F.batch_norm({x}, None, None, {x}.transpose(0, 1).flatten(1).mean(1), None, training=True, eps=0.1) if {x}.dim() > 1 else {x}",
    "{x}.sum_to_size(1) * 0.01", "({x} / ({x}.square().sum({d}, keepdim=True) + 0.1).sqrt()).mean({d}{k})", "{x}.softmax({i}).square().sum({d}{k}).log()", "({x} - {x}.amax({d}, keepdim=True)).exp().sum({d}{k}).log()",
)  # fmt: skip
MORE_LOSSES = (
    "F.ctc_loss({x}.log_softmax(-1), torch.ones(({x}.shape[1], 1), dtype=torch.int64), ({x}.shape[0],) * {x}.shape[1], (1,) * {x}.shape[1]) if {x}.dim() == 3 and {x}.shape[-1] > 1 else {x}", "F.kl_div({x}.log_softmax({i}), {x}.tanh().log_softmax({i}), log_target=True, reduction='sum')", "F.huber_loss({x}, {x}.flip({i}), delta=0.3)", "F.binary_cross_entropy_with_logits({x}, {x}.detach().sigmoid(), weight={x}.detach().abs(), pos_weight={x}.detach().abs().amax({d}, keepdim=True) + 0.5)", "F.binary_cross_entropy({x}.sigmoid() * 0.8 + 0.1, {x}.tanh() * 0.4 + 0.5)", "F.multi_margin_loss({x}, torch.arange({x}.shape[0]) % {x}.shape[1]) if {x}.dim() == 2 else {x}",
    "F.hinge_embedding_loss({x}, {x}.detach().sign(), margin=0.7)", "F.margin_ranking_loss({x}, {x}.flip({i}), torch.ones({x}.shape), margin=0.1)", "F.cosine_embedding_loss({x}, {x} * 0.5 + 1, torch.ones({x}.shape[0])) if {x}.dim() == 2 else {x}", "F.multilabel_soft_margin_loss({x}, ({x}.detach() > 0).to({x}.dtype)) if {x}.dim() == 2 else {x}", "F.cross_entropy({x}, torch.arange({x}.shape[0]) % {x}.shape[1], ignore_index=0, reduction='sum') * 0.1 if {x}.dim() == 2 else {x}", "F.cross_entropy({x}, torch.arange({x}.shape[0]) % {x}.shape[1], weight=torch.linspace(0.1, 1, {x}.shape[1], dtype={x}.dtype), label_smoothing=0.2) if {x}.dim() == 2 else {x}",
    "F.cross_entropy({x}, torch.zeros({x}.shape[0], *{x}.shape[2:], dtype=torch.int64), reduction='none') if {x}.dim() > 2 else {x}", "F.nll_loss({x}.log_softmax(1), torch.zeros({x}.shape[0], *{x}.shape[2:], dtype=torch.int64)) if {x}.dim() in (2, 4) else {x}", "F.smooth_l1_loss({x}, {x}.detach() * 0.9, beta=0.0)", "F.l1_loss({x}.relu(), {x}.relu().detach())", "F.mse_loss({x}, {x}.mean({d}, keepdim=True).expand_as({x}).detach(), reduction='sum') * 0.01", "({x}.logsumexp({i}).square().mean() * 0.1 + F.gelu({x}).mean())",
)  # fmt: skip
IMAGES = (
    "F.fold(F.unfold({x}, 2), {x}.shape[-2:], 2)", "F.interpolate({x}, size=(3, 5), mode='bicubic')", "F.interpolate({x}, size=(5, 2), mode='bilinear', antialias=True)", "F.interpolate({x}, size=(3, 3), mode='area')", "F.interpolate({x}, scale_factor=1.7, mode='nearest-exact')", "F.interpolate({x}, size=(2, 7), mode='bilinear', align_corners=True)", "F.pad({x}, (1, 0, 0, 1), mode='circular')", "F.pad({x}, (-1, 1, 1, -1))", "F.grid_sample({x}, {x}.mean(1, keepdim=True).movedim(1, -1).tanh() * torch.tensor([0.9, -0.7], dtype={x}.dtype))", "F.grid_sample({x}, {x}.mean(1, keepdim=True).movedim(1, -1).tanh() * torch.tensor([0.9, -0.7], dtype={x}.dtype), padding_mode='border', align_corners=True)",
    "F.grid_sample({x}, {x}.mean(1, keepdim=True).movedim(1, -1) * torch.tensor([1.9, -1.7], dtype={x}.dtype), padding_mode='reflection')", "F.grid_sample({x}, F.affine_grid({x}.mean((1, 2, 3)).view(-1, 1, 1) * 0.1 + torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.8, 0.1]], dtype={x}.dtype), (*{x}.shape[:2], 3, 4)))", "F.max_unpool2d(*F.max_pool2d({x}, 2, return_indices=True), 2, output_size={x}.shape[-2:])", "F.avg_pool2d({x}, 2, ceil_mode=True, divisor_override=3)", "F.adaptive_avg_pool2d({x}, (3, None))", "F.adaptive_max_pool2d({x}.relu(), (2, 1))", "F.max_pool2d({x}.relu(), 2, 1)", "F.pixel_shuffle({x}.repeat(1, 4, 1, 1), 2)",
    "F.conv2d({x}, {x}[:2, :, :2, :2].tanh(), padding=1) * 0.1", "F.conv_transpose2d({x}, {x}[:1, :1, :2, :2].expand({x}.shape[1], 2, -1, -1)) * 0.1", "F.conv2d({x}, {x}[:1, :1, :2, :2].expand({x}.shape[1], 1, -1, -1), groups={x}.shape[1]) * 0.1", "F.instance_norm({x}, eps=0.1)", "F.group_norm({x}, 1, {x}.mean((0, 2, 3)), eps=0.1)", "F.scaled_dot_product_attention({x}, {x}.tanh(), {x} * 2, is_causal=True)", "F.scaled_dot_product_attention({x}, {x}, {x}, attn_mask=(torch.arange({x}.shape[-2]) % 2 == 0).expand({x}.shape[-2], -1))", "{x}.softmax(1).amax(1)", "F.local_response_norm({x}, 3)", "F.channel_shuffle({x}, 1)",
)  # fmt: skip
CASTS = (
    "{x}.bfloat16().float().to({x}.dtype)", "({x}.half() * 2).to({x}.dtype)", "{x}.double().softmax({i}).to({x}.dtype)", "{x}.float().mean({d}, keepdim=True).to({x}.dtype) * {x}", "{x}.to(torch.bfloat16).sum({d}{k}).to({x}.dtype)", "{x}.float().square().sum({d}{k}).to({x}.dtype) * 0.1",
)  # fmt: skip


def _of(templates: tuple[str, ...], dims: range) -> random_models.Step:
    def step(sketch: Sketch) -> None:
        x = sketch.pick(lambda value: value.dim() in dims and value.numel() > 0)
        if x is not None:
            fill(sketch, templates, x)

    return step


def _layer(sketch: Sketch) -> None:
    """A layer with parameters that are used in more than one way."""
    x = sketch.pick(lambda value: value.dim() > 1 and value.numel() > 0 and value.dtype is sketch.model.dtype)
    if x is None:
        return
    value = sketch.values[x]
    width = value.shape[-1]
    mode = sketch.draw(st.sampled_from(["sum", "mean", "max"]))
    places = f"torch.arange({value.shape[0]}) % 5"
    kinds = [
        (f"nn.Bilinear({width}, {width}, 2)", f"({x}, {x})"),
        ("nn.PReLU()", f"({x})"),
        (f"nn.PReLU({value.shape[1]}, init=0.1)", f"({x})"),
        (f"nn.utils.parametrizations.weight_norm(nn.Linear({width}, 3))", f"({x})"),
        ("nn.Embedding(5, 3, padding_idx=1)", f"({places}).sin() * {x}.mean()"),
        (f"nn.EmbeddingBag(5, 3, mode='{mode}', padding_idx=1)", f"(({places}).view(-1, 1).expand(-1, 2))"),
    ]
    if value.dim() == 2:
        kinds += [(f"nn.GRUCell({width}, 3)", f"({x})"), (f"nn.LSTMCell({width}, 3)", f"({x})[1]")]
    if value.dim() == 3:
        kinds += [
            (f"nn.LSTM({width}, 2, batch_first=True)", f"({x}[:, :3])[0]"),
            (f"nn.MultiheadAttention({width}, 1, batch_first=True)", f"({x}, {x}, {x}, need_weights=False)[0]"),
            (f"nn.TransformerEncoderLayer({width}, 1, 4, dropout=0.0, batch_first=True)", f"({x})"),
        ]
    made, call = sketch.draw(st.sampled_from(kinds))
    sketch.add(f"{sketch.layer(made)}{call}")


ANY = range(1, 7)
STEPS = (
    *random_models.STEPS,
    *3 * (_of(EXTREMES, ANY), _of(LOSSES, ANY), _of(PLACES, ANY), _of(SUMS, ANY), _of(WRITES, ANY)),
    *2 * (_of(POOLS, range(4, 5)), _of(IMAGES, range(4, 5)), _of(CASTS, ANY), _of(TIES, ANY)),
    *2 * (_of(VIEWED, ANY), _of(MORE_LOSSES, ANY), _layer),
)


def _unread(model: Model) -> list[str]:
    """Values that are part of no other: each has a gradient then, as far as it can have one."""
    found = [made for line in model.lines if (made := re.search(r"\b(v\d*) = (.*)", line))]
    read = {name for made in found for name in re.findall(r"\bv\d*\b", made[2])}
    return [made[1] for made in found if made[1] not in read]


@st.composite
def trained_models(draw: st.DrawFn, large: bool = False) -> Model:
    """Models without marks, of steps in which gradients differ from values, that return all that they make and do not read.

    A third of those in float32 runs under autocast, from some line on.
    """
    model = draw(random_models.models(8, large, STEPS, least_steps=3))
    model = replace(model, results=[*_unread(model), *model.results[1:]])
    narrow = draw(st.sampled_from(["bfloat16", "bfloat16", "float16", *6 * [None]]))
    if model.dtype is torch.float32 and narrow is not None:
        context = f"with torch.autocast(x0.device.type, torch.{narrow})"
        first = draw(st.sampled_from([0, 0, len(model.lines) // 2]))
        lines = (
            f"{context}{line.replace('with', ',', 1) if line.startswith('with') else f': {line}'}"
            for line in model.lines[first:]
        )
        return replace(model, lines=[*model.lines[:first], *lines])
    return model
