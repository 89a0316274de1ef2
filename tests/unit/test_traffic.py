"""What usual chains of operators move on a GPU, beside the tensors that they must read and write: no more than is said here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.config import override
from tests.support.moved import Given, moved

aten = torch.ops.aten

FEW = 0.02
"""Of the least: statistics, weights, and sums of a few pieces."""

BETTER = 0.05
"""What a chain may move less than is said before that has to be said."""

ROWS, LONG, WORDS = (8192, 4096), (512, 65536), (4096, 32000)
TOKENS, DIM = (8, 4096, 1024), (1024,)
IMAGES, LARGE, LAST, CHANNELS = (32, 64, 128, 128), (8, 32, 512, 512), (32, 128, 128, 64), (64,)

Chain = tuple[Callable[..., Any], tuple[Given, ...]]


def chain(function: Callable[..., Any], *inputs: tuple[int, ...] | Given) -> Chain:
    """A function, and what it takes: tensors of float32 unless more is said of them."""
    return function, tuple(each if isinstance(each, Given) else Given(each) for each in inputs)


def halves(*shape: int) -> Given:
    return Given(shape, torch.bfloat16)


def places(*shape: int) -> Given:
    return Given(shape, torch.int64)


def both(x: Tensor, then: Callable[[Tensor], Any]) -> tuple[Any, ...]:
    """`x`, and what comes of it."""
    return x, then(x)


def gated(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.cat([-x[..., 64:], x[..., :64]], -1) * sin


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return p - 1e-3 * m / (v.sqrt() + 1e-8), m, v


POINTWISE = {
    "gelu-gate": chain(lambda x: F.gelu(x) * torch.sigmoid(x), TOKENS),
    "swiglu": chain(gated, TOKENS, TOKENS),
    "swiglu-of-one": chain(lambda x: gated(*x.chunk(2, -1)), TOKENS),
    "swiglu-bf16": chain(gated, halves(*TOKENS), halves(*TOKENS)),
    "bias-gelu": chain(lambda x, b: F.gelu(x + b), TOKENS, DIM),
    "residual": chain(lambda x, y, b: x + (y + b) * 0.5, TOKENS, TOKENS, DIM),
    "rotary": chain(rotary, (8, 16, 2048, 128), (2048, 128), (2048, 128)),
    "adam": chain(adam, ROWS, ROWS, ROWS, ROWS),
    "sigmoid-tanh": chain(lambda x: (x.sigmoid(), x.tanh()), ROWS),
    "relu-alone": chain(lambda x: x.relu(), ROWS),
}


def layer_norm(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, DIM, w, b)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, DIM, w)


def channel_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x.permute(0, 2, 3, 1), CHANNELS, w, b)


def batch_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, w, b, True)


def tracked_norm(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return F.batch_norm(x, mean, var, w, b, True).relu(), mean, var


def response_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Global response normalisation of ConvNeXt V2, https://arxiv.org/abs/2301.00808."""
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    return w * (x * (norms / (norms.mean(-1, keepdim=True) + 1e-6))) + b + x


def embedded(i: Tensor, table: Tensor, positions: Tensor, w: Tensor) -> Tensor:
    return layer_norm(F.embedding(i, table) + positions, w)


NORMS = {
    "layer_norm": chain(layer_norm, TOKENS, DIM, DIM),
    "layer_norm-residual": chain(lambda x, y, w: layer_norm(x + y, w), TOKENS, TOKENS, DIM),
    "layer_norm-residual-returned": chain(lambda x, y, w: both(x + y, lambda z: layer_norm(z, w)), TOKENS, TOKENS, DIM),
    "layer_norm-gelu": chain(lambda x, w, b: F.gelu(layer_norm(x, w, b)), TOKENS, DIM, DIM),
    "layer_norm-mean-tokens": chain(lambda x, w, b: layer_norm(x, w, b).mean(1), TOKENS, DIM, DIM),
    "layer_norm-twice": chain(lambda x, w, v: (layer_norm(x, w), layer_norm(x, v)), TOKENS, DIM, DIM),
    "layer_norm-channels": chain(channel_norm, IMAGES, CHANNELS, CHANNELS),
    "layer_norm-channels-and-back": chain(
        lambda x, w, b: channel_norm(x, w, b).permute(0, 3, 1, 2).contiguous(), IMAGES, CHANNELS, CHANNELS
    ),
    "rms_norm": chain(rms_norm, TOKENS, DIM),
    "rms_norm-residual-returned": chain(lambda x, y, w: both(x + y, lambda z: rms_norm(z, w)), TOKENS, TOKENS, DIM),
    "rms_norm-residual-returned-bf16": chain(
        lambda x, y, w: both(x + y, lambda z: rms_norm(z, w)), halves(*TOKENS), halves(*TOKENS), halves(*DIM)
    ),
    "group_norm-silu": chain(lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)), IMAGES, CHANNELS, CHANNELS),
    "group_norm-1": chain(lambda x, w, b: F.group_norm(x, 1, w, b), IMAGES, CHANNELS, CHANNELS),
    "instance_norm": chain(lambda x: F.instance_norm(x), LARGE),
    "batch_norm-relu": chain(tracked_norm, IMAGES, CHANNELS, CHANNELS, CHANNELS, CHANNELS),
    "batch_norm-residual": chain(
        lambda x, y, w, b: (batch_norm(x, w, b) + y).relu(), IMAGES, IMAGES, CHANNELS, CHANNELS
    ),
    "batch_norm-eval-residual": chain(
        lambda x, y, m, v: (F.batch_norm(x, m, v) + y).relu(), IMAGES, IMAGES, CHANNELS, CHANNELS
    ),
    "l2-norm": chain(lambda x: F.normalize(x, dim=-1), TOKENS),
    "l2-norm-channels": chain(lambda x: F.normalize(x, dim=1), IMAGES),
    "response_norm": chain(response_norm, LAST, CHANNELS, CHANNELS),
    "z-score": chain(lambda x: (x - x.mean()) / x.std(), ROWS),
    "max-norm": chain(lambda x: x / x.abs().amax(), ROWS),
    "embedding-norm": chain(
        lambda i, table, w: layer_norm(F.embedding(i, table), w), places(8, 4096), (8192, 1024), DIM
    ),
    "embedding-positions-norm": chain(embedded, places(8, 4096), (8192, 1024), (4096, 1024), DIM),
}


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return F.softmax((x * 0.125).masked_fill(mask, -1e9), -1)


def divergence(x: Tensor, y: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction="batchmean")


LOSSES = {
    "softmax": chain(lambda x: F.softmax(x, -1), ROWS),
    "softmax-long": chain(lambda x: F.softmax(x, -1), LONG),
    "softmax-channels": chain(lambda x: F.softmax(x, 1), IMAGES),
    "softmax-masked-bf16": chain(masked, halves(*ROWS), Given(ROWS, torch.bool)),
    "softmax-mean-rows": chain(lambda x: F.softmax(x, -1).mean(0), ROWS),
    "softmax-argmax": chain(lambda x: (F.softmax(x, -1), x.argmax(-1)), ROWS),
    "log_softmax-nll": chain(lambda x, i: F.nll_loss(F.log_softmax(x, -1), i, reduction="none"), WORDS, places(4096)),
    "cross_entropy": chain(lambda x, i: F.cross_entropy(x, i), WORDS, places(4096)),
    "kl_div": chain(divergence, ROWS, ROWS),
    "mse": chain(lambda x, y: F.mse_loss(x, y), ROWS, ROWS),
    "mse-and-gradient": chain(lambda x, y: (F.mse_loss(x, y), (x - y) * (2 / x.numel())), ROWS, ROWS),
    "huber": chain(lambda x, y: F.huber_loss(x, y), ROWS, ROWS),
    "bce-with-logits": chain(lambda x, y: F.binary_cross_entropy_with_logits(x, y), ROWS, ROWS),
}

REDUCTIONS = {
    "logsumexp": chain(lambda x: x.logsumexp(-1), ROWS),
    "argmax": chain(lambda x: x.argmax(-1), ROWS),
    "max-and-position": chain(lambda x: x.max(-1), ROWS),
    "cumsum": chain(lambda x: x.cumsum(-1), ROWS),
    "cumsum-columns": chain(lambda x: x.cumsum(0), ROWS),
    "var_mean": chain(lambda x: torch.var_mean(x, -1), ROWS),
    "var_mean-columns": chain(lambda x: torch.var_mean(x, 0), ROWS),
    "mean-std": chain(lambda x: (x.mean(-1), x.std(-1)), ROWS),
    "sum-amax": chain(lambda x: (x.sum(1), x.amax(1)), ROWS),
    "sum-amax-tokens": chain(lambda x: (x.sum(1), x.amax(1)), TOKENS),
    "l1-l2-columns": chain(lambda x: (x.abs().sum(0), (x * x).sum(0)), ROWS),
    "sums-of-rows-and-columns": chain(lambda x: (x.sum(0), x.sum(1)), ROWS),
    "doubled-and-sum": chain(lambda x: (x * 2, (x * 2).sum(1)), ROWS),
    "relu-and-mean": chain(lambda x: (x.relu(), x.mean(1)), ROWS),
    "relu-and-mean-channels": chain(lambda x: (x.relu(), x.mean(1)), IMAGES),
    "relu-and-mean-columns": chain(lambda x: (x.relu(), x.mean(0)), ROWS),
    "half-and-amax": chain(lambda x: (x.half(), x.amax(1)), ROWS),
    "sum-of-two-and-sums-of-each": chain(lambda x, y: (x + y, x.sum(1), y.sum(1)), ROWS, ROWS),
}


def layer_norm_backward(g: Tensor, x: Tensor, mean: Tensor, scale: Tensor, w: Tensor) -> Any:
    return aten.native_layer_norm_backward(g, x, DIM, mean, scale, w, w, [True, True, True])


def rms_norm_backward(g: Tensor, x: Tensor, scale: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    normal, weighted = x * scale, g * w
    return scale * (weighted - normal * (weighted * normal).mean(-1, keepdim=True)), (g * normal).sum((0, 1))


def batch_norm_backward(g: Tensor, x: Tensor, mean: Tensor, scale: Tensor, w: Tensor) -> Any:
    return aten.native_batch_norm_backward(g, x, w, None, None, mean, scale, True, 1e-5, [True, True, True])


GRADIENTS = {
    "layer_norm-with-statistics": chain(lambda x, w, b: aten.native_layer_norm(x, DIM, w, b, 1e-5), TOKENS, DIM, DIM),
    "layer_norm-backward": chain(layer_norm_backward, TOKENS, TOKENS, (8, 4096, 1), (8, 4096, 1), DIM),
    "rms_norm-backward": chain(rms_norm_backward, TOKENS, TOKENS, (8, 4096, 1), DIM),
    "batch_norm-backward": chain(batch_norm_backward, IMAGES, IMAGES, CHANNELS, CHANNELS, CHANNELS),
    "softmax-backward": chain(lambda g, y: aten._softmax_backward_data(g, y, -1, torch.float32), ROWS, ROWS),
    "gelu-backward-and-bias": chain(
        lambda g, x: both(aten.gelu_backward(g, x), lambda d: d.sum((0, 1))), TOKENS, TOKENS
    ),
    "gelu-backward-and-bias-of-images": chain(
        lambda g, x: both(aten.gelu_backward(g, x), lambda d: d.sum((0, 1, 2))), (32, 56, 56, 384), (32, 56, 56, 384)
    ),
    "relu-backward-and-bias": chain(
        lambda g, y: both(aten.threshold_backward(g, y, 0), lambda d: d.sum((0, 2, 3))), IMAGES, IMAGES
    ),
}


def pool_mixer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The token mixer of PoolFormer, https://arxiv.org/abs/2111.11418."""
    normal = F.group_norm(x, 1, w, b)
    return x + F.avg_pool2d(normal, 3, 1, 1, count_include_pad=False) - normal


IMAGE_CHAINS = {
    "max_pool": chain(lambda x: F.max_pool2d(x, 2), IMAGES),
    "max_pool-overlapping": chain(lambda x: F.max_pool2d(x, 3, 2, 1), IMAGES),
    "avg_pool": chain(lambda x: F.avg_pool2d(x, 2), IMAGES),
    "avg_pool-overlapping": chain(lambda x: F.avg_pool2d(x, 3, 1, 1), IMAGES),
    "global-mean": chain(lambda x: F.adaptive_avg_pool2d(x, 1), IMAGES),
    "max_pool-mean": chain(lambda x: F.max_pool2d(x, 2).mean((2, 3)), IMAGES),
    "batch_norm-eval-relu-max_pool": chain(
        lambda x, m, v: F.max_pool2d(F.batch_norm(x, m, v).relu(), 2), IMAGES, CHANNELS, CHANNELS
    ),
    "batch_norm-relu-max_pool": chain(
        lambda x, w, b: F.max_pool2d(batch_norm(x, w, b).relu(), 2), IMAGES, CHANNELS, CHANNELS
    ),
    "batch_norm-relu-max_pool-overlapping": chain(
        lambda x, w, b: F.max_pool2d(batch_norm(x, w, b).relu(), 3, 2, 1), IMAGES, CHANNELS, CHANNELS
    ),
    "group_norm-relu-max_pool": chain(
        lambda x, w, b: F.max_pool2d(F.group_norm(x, 32, w, b).relu(), 2), IMAGES, CHANNELS, CHANNELS
    ),
    "group_norm-relu-avg_pool": chain(
        lambda x, w, b: F.avg_pool2d(F.group_norm(x, 32, w, b).relu(), 2), IMAGES, CHANNELS, CHANNELS
    ),
    "pool-mixer": chain(pool_mixer, IMAGES, CHANNELS, CHANNELS),
    "squeeze-excite": chain(lambda x, w: x * torch.sigmoid(x.mean((2, 3), keepdim=True) * w), IMAGES, (64, 1, 1)),
    "means-maxima": chain(lambda x: (x.mean((2, 3)), x.amax((2, 3))), IMAGES),
    "means-maxima-over-channels": chain(lambda x: (x.mean(1), x.amax(1)), IMAGES),
    "means-maxima-concatenated": chain(
        lambda x: torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1), IMAGES
    ),
    "spatial-gate": chain(lambda x: x * torch.sigmoid(x.mean(1, keepdim=True) + x.amax(1, keepdim=True)), IMAGES),
    "channels-last": chain(lambda x: x.permute(0, 2, 3, 1).contiguous(), IMAGES),
    "channel_shuffle": chain(lambda x: F.channel_shuffle(x, 4), IMAGES),
    "pixel_shuffle": chain(lambda x: F.pixel_shuffle(x, 2), IMAGES),
}

CHAINS = POINTWISE | NORMS | LOSSES | REDUCTIONS | GRADIENTS | IMAGE_CHAINS

WHOLE = "statistics of everything are there when all has been read, and so much does not stay on the chip"
PIECES = "sums along rows and columns: each block of rows leaves sums of its own"
POOLED = "the kernel that finds statistics has no windows, so the one that pools reads again"

MORE = {
    "z-score": (1.5, WHOLE),
    "max-norm": (1.5, WHOLE),
    "response_norm": (1.5, "norms of a sample's channels are compared before its elements are read again"),
    "layer_norm-mean-tokens": (1.13, PIECES),
    "softmax-mean-rows": (1.13, PIECES),
    "sums-of-rows-and-columns": (1.13, PIECES),
    "layer_norm-backward": (1.02, PIECES),
    "rms_norm-backward": (1.02, PIECES),
    "batch_norm-relu-max_pool": (1.8, WHOLE),
    "batch_norm-relu-max_pool-overlapping": (1.8, WHOLE),
    "group_norm-relu-max_pool": (1.8, POOLED),
    "group_norm-relu-avg_pool": (1.8, POOLED),
    "pool-mixer": (1.5, POOLED),
    "cross_entropy": (2.0, "a gather counts as all of its table, of which it reads one number for each row"),
    "sum-of-two-and-sums-of-each": (1.33, "what is stored for each element joins one of the sums, not both"),
}
"""How many times the least those chains move that move it more than once, and why."""


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_moves_what_is_said(name: str) -> None:
    function, inputs = CHAINS[name]
    times, _ = MORE.get(name, (1.0, ""))
    found = moved(function, *inputs)
    assert found.ratio <= times * (1 + FEW), str(found)
    assert found.ratio >= times * (1 - BETTER), f"less than is said: {found}"


def test_all_that_is_said_is_said_of_a_chain() -> None:
    assert MORE.keys() <= CHAINS.keys()


def test_operators_that_are_left_to_pytorch_count_one_by_one() -> None:
    with override(disable="all"):
        found = moved(lambda x: F.gelu(x) * torch.sigmoid(x), Given(ROWS))
    assert [step.name for step in found.steps] == ["gelu", "sigmoid", "mul"]
    assert found.ratio == 7 / 2


def test_what_is_not_read_need_not_move() -> None:
    found = moved(lambda x, y: x.exp().sum(), Given(ROWS), Given(ROWS))
    assert found.least == 4 * (8192 * 4096 + 1)
