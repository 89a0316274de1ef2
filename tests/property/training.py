"""Random models to be trained: besides what all have, what has gradients of its own: extremes, losses, pools, gathers, scans."""

from __future__ import annotations

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
CASTS = (
    "{x}.bfloat16().float().to({x}.dtype)", "({x}.half() * 2).to({x}.dtype)", "{x}.double().softmax({i}).to({x}.dtype)", "{x}.float().mean({d}, keepdim=True).to({x}.dtype) * {x}", "{x}.to(torch.bfloat16).sum({d}{k}).to({x}.dtype)", "{x}.float().square().sum({d}{k}).to({x}.dtype) * 0.1",
)  # fmt: skip


def _of(templates: tuple[str, ...], dims: range) -> random_models.Step:
    def step(sketch: Sketch) -> None:
        x = sketch.pick(lambda value: value.dim() in dims and value.numel() > 0)
        if x is not None:
            fill(sketch, templates, x)

    return step


ANY = range(1, 7)
STEPS = (
    *random_models.STEPS,
    *3 * (_of(EXTREMES, ANY), _of(LOSSES, ANY), _of(PLACES, ANY)),
    *2 * (_of(POOLS, range(4, 5)), _of(CASTS, ANY)),
)


@st.composite
def trained_models(draw: st.DrawFn, large: bool = False) -> Model:
    """Models without marks, of steps in which gradients differ from values; a third of those in float32 runs under autocast."""
    model = draw(random_models.models(8, large, STEPS))
    narrow = draw(st.sampled_from(["bfloat16", "bfloat16", "float16", *6 * [None]]))
    if model.dtype is torch.float32 and narrow is not None:
        context = f"with torch.autocast(x0.device.type, torch.{narrow})"
        lines = (
            f"{context}{line.replace('with', ',', 1) if line.startswith('with') else f': {line}'}"
            for line in model.lines
        )
        return replace(model, lines=[*lines])
    return model
