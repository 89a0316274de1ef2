"""Whole training programs as people write them, tiny: models, losses, optimisers, schedules, and what else a step does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrizations
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.models.zoo import GPT, Llama, UNet, ViT, generator, resnet

Wrap = Callable[[nn.Module], Callable[..., Any]]
"""Gives what is called in the place of a module."""


@dataclass(frozen=True)
class Program:
    """A program that was begun.

    Attributes:
        modules: all that it trains or keeps.
        step: does a step, which has a number, and gives its loss.
    """

    modules: tuple[nn.Module, ...]
    step: Callable[[int], Tensor]

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers."""
        for number, module in enumerate(self.modules):
            yield from (
                (f"{number}.{name}", each) for name, each in chain(module.named_parameters(), module.named_buffers())
            )


class Loss(nn.Module):
    """A model and a loss of its result."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.loss(self.model(x), *others)


def _normal(step: int, *size: int) -> Tensor:
    """Numbers of a step, the same ones on each device, on the default one."""
    found = torch.randn(size, generator=torch.Generator("cpu").manual_seed(step), device="cpu")
    return found.to(torch.get_default_device())


def _whole(step: int, most: int, *size: int) -> Tensor:
    found = torch.randint(most, size, generator=torch.Generator("cpu").manual_seed(step), device="cpu")
    return found.to(torch.get_default_device())


def _descend(optimizer: Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def classifier(wrap: Wrap) -> Program:
    """A residual network with batch normalisation, smoothed labels, momentum and a learning rate that falls in steps."""
    model = Loss(resnet(), lambda scores, labels: F.cross_entropy(scores, labels, label_smoothing=0.1))
    call = wrap(model)
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
    schedule = StepLR(optimizer, 10, 0.3)

    def step(number: int) -> Tensor:
        loss = _descend(optimizer, call(_normal(number, 4, 3, 16, 16), _whole(number, 10, 4)))
        schedule.step()
        return loss

    return Program((model,), step)


def segmentation(wrap: Wrap) -> Program:
    """Cross entropy with classes that count more than others, and the overlap of areas (Dice)."""

    def loss(areas: Tensor, labels: Tensor) -> Tensor:
        wanted = F.one_hot(labels, 2).movedim(-1, 1).to(areas.dtype)
        overlap = 2 * (areas * wanted).sum((2, 3)) / (areas.sum((2, 3)) + wanted.sum((2, 3)) + 1e-3)
        return F.nll_loss((areas + 1e-4).log(), labels, areas.new_tensor([0.3, 0.7])) + 1 - overlap.mean()

    model = Loss(UNet(), loss)
    call = wrap(model)
    optimizer = Adam(model.parameters(), 3e-3)
    return Program((model,), lambda n: _descend(optimizer, call(_normal(n, 2, 3, 13, 12), _whole(n, 2, 2, 13, 12))))


def vit(wrap: Wrap) -> Program:
    """Mixed images and labels, stochastic depth by hand, a learning rate that rises first."""
    model = Loss(ViT(), lambda scores, shares: -(shares * scores.log_softmax(-1)).sum(-1).mean())
    call = wrap(model)
    optimizer = AdamW(model.parameters(), 3e-3, weight_decay=0.05)
    schedule = LambdaLR(optimizer, lambda number: min(1.0, (number + 1) / 8))

    def step(number: int) -> Tensor:
        x, labels = _normal(number, 4, 3, 16, 16), F.one_hot(_whole(number, 5, 4), 5).double()
        share = 0.3 + 0.02 * number
        mixed = [share * each + (1 - share) * each.flip(0) for each in (x, labels)]
        loss = _descend(optimizer, call(*mixed))
        schedule.step()
        return loss

    return Program((model,), step)


class Dropping(nn.Module):
    """A small GPT whose words are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt, self.drop = GPT(), nn.Dropout(0.1)
        for block in self.gpt.blocks:
            block.mlp.append(nn.Dropout(0.2))
        self.gpt.norm = nn.Sequential(self.gpt.norm, self.drop)

    def forward(self, words: Tensor) -> Tensor:
        return self.gpt(words[:, :-1]).transpose(1, 2)


def gpt(wrap: Wrap) -> Program:
    """Tied embeddings, dropout, two groups of parameters, gradients that gather over two batches and are clipped."""
    model = Loss(Dropping(), lambda scores, words: F.nll_loss(scores, words[:, 1:], ignore_index=3))
    call = wrap(model)
    several = [each for each in model.parameters() if each.dim() > 1]
    single = [each for each in model.parameters() if each.dim() < 2]
    optimizer = AdamW([{"params": several, "weight_decay": 0.1}, {"params": single, "weight_decay": 0.0}], 3e-3)
    schedule = CosineAnnealingLR(optimizer, 30)

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        losses = []
        for part in range(2):
            words = _whole(2 * number + part, 30, 2, 9)
            losses.append(call(words, words) / 2)
            losses[-1].backward()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        return sum(losses).detach() + norm.detach()  # type: ignore[union-attr]

    return Program((model,), step)


class Words(nn.Module):
    """A layer between an embedding and scores."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(20, 16), layer, nn.Linear(16, 20, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layer(self.words(words[:, :-1])))


def llama(wrap: Wrap) -> Program:
    """Rotary positions, grouped keys, a soft cap of scores and a loss of their normaliser (z-loss)."""

    def loss(scores: Tensor, words: Tensor) -> Tensor:
        scores = 15 * torch.tanh(scores / 15)
        return (
            F.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten()) + 1e-2 * scores.logsumexp(-1).square().mean()
        )

    model = Loss(Words(Llama()), loss)
    call = wrap(model)
    optimizer = AdamW(model.parameters(), 5e-3, betas=(0.9, 0.95), foreach=True)

    def step(number: int) -> Tensor:
        words = _whole(number, 20, 2, 8)
        return _descend(optimizer, call(words, words))

    return Program((model,), step)


class T5(nn.Module):
    """Encoder and decoder with a bias for each distance, masks, and attention from one to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.distances = nn.Embedding(20, 16, padding_idx=0), nn.Embedding(8, 2)
        self.norms = nn.ModuleList([nn.RMSNorm(16) for _ in range(5)])
        self.projections = nn.ModuleList([nn.Linear(16, 64, bias=False) for _ in range(3)])
        self.up, self.gate, self.down = nn.Linear(16, 24, False), nn.Linear(16, 24, False), nn.Linear(24, 16, False)

    def attend(self, x: Tensor, other: Tensor, number: int, mask: Tensor | None) -> Tensor:
        rows = self.projections[number].weight.chunk(4)
        q, k, v = (
            F.linear(each, row).unflatten(-1, (2, 8)).transpose(1, 2)
            for each, row in zip((x, other, other), rows, strict=False)
        )
        scores = q @ k.mT
        if number < 2:
            place = torch.arange(x.shape[1], device=x.device)
            bucket = (place[None] - place[:, None]).clamp(-3, 4) + 3
            scores = scores + self.distances(bucket).permute(2, 0, 1)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ rows[3]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        given = (source != 0)[:, None, None]
        x = self.words(source)
        normed = self.norms[0](x)
        x = x + self.attend(normed, normed, 0, given)
        normed = self.norms[1](x)
        x = x + self.down(F.gelu(self.gate(normed), approximate="tanh") * self.up(normed))
        y = self.words(F.pad(target[:, :-1], (1, 0)))
        normed = self.norms[2](y)
        y = y + self.attend(
            normed, normed, 1, torch.ones(y.shape[1], y.shape[1], dtype=torch.bool, device=y.device).tril()
        )
        y = y + self.attend(self.norms[3](y), x, 2, given)
        scores = self.norms[4](y) @ self.words.weight.mT * 0.25
        return F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=0)


def t5(wrap: Wrap) -> Program:
    model = T5()
    call = wrap(model)
    optimizer = Adam(model.parameters(), 3e-3, amsgrad=True)
    return Program((model,), lambda n: _descend(optimizer, call(_whole(n, 20, 2, 7), _whole(n + 99, 20, 2, 5))))


class Experts(nn.Module):
    """The two best of four experts for each word, with room for so many words each, and a loss of how evenly they are asked."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 12) * 0.3), nn.Parameter(torch.randn(4, 12, 8) * 0.3)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        best, which = shares.topk(2, -1)
        best = best / best.sum(-1, keepdim=True)
        chosen = F.one_hot(which, 4)
        place = (chosen.flatten(0, 1).cumsum(0) - 1).view_as(chosen)
        room = ((place < 5) * chosen)[..., None] * F.one_hot(place.clamp(0, 4), 5)  # words, choices, experts, places
        sent = torch.einsum("wcep,wd->epd", room.to(x.dtype), x)
        made = torch.bmm(F.silu(torch.bmm(sent, self.up)), self.down)
        y = x + torch.einsum("wcep,wc,epd->wd", room.to(x.dtype), best, made)
        even = 4 * (chosen.sum(1).to(x.dtype).mean(0) * shares.mean(0)).sum()
        return F.mse_loss(y, wanted) + 0.01 * even


def moe(wrap: Wrap) -> Program:
    model = Experts()
    call = wrap(model)
    optimizer = Adam(model.parameters(), 1e-2)
    return Program((model,), lambda n: _descend(optimizer, call(_normal(n, 12, 8), _normal(n, 12, 8).tanh())))


class VAE(nn.Module):
    """Draws its noise itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ELU(), nn.Flatten(), nn.Linear(128, 8))
        self.decode = nn.Sequential(
            nn.Linear(4, 128), nn.ELU(), nn.Unflatten(1, (8, 4, 4)), nn.ConvTranspose2d(8, 1, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encode(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1)
        pixels = F.binary_cross_entropy_with_logits(self.decode(code), x, reduction="none").flatten(1).sum(1)
        return (pixels + divergence).mean()


def vae(wrap: Wrap) -> Program:
    model = VAE()
    call = wrap(model)
    optimizer = Adam(model.parameters(), 1e-2)
    return Program((model,), lambda n: _descend(optimizer, call(_normal(n, 3, 1, 8, 8).sigmoid())))


def gan(wrap: Wrap) -> Program:
    """Two networks in turn, one of them with weights of norm one, each with a hinge loss."""
    maker = generator()
    norm = parametrizations.spectral_norm
    judge = nn.Sequential(
        norm(nn.Conv2d(3, 8, 4, 2, 1)), nn.LeakyReLU(0.2), norm(nn.Conv2d(8, 8, 4, 2, 1)), nn.InstanceNorm2d(8, affine=True),
        nn.LeakyReLU(0.2, inplace=True), nn.Flatten(), nn.Linear(128, 1),
    )  # fmt: skip
    make, ask = wrap(maker), wrap(judge)
    makers, judges = Adam(maker.parameters(), 2e-3, betas=(0.5, 0.9)), Adam(judge.parameters(), 2e-3, betas=(0.5, 0.9))

    def step(number: int) -> Tensor:
        real, noise = _normal(number, 3, 3, 16, 16).tanh(), _normal(number + 99, 3, 16)
        fake = make(noise)
        second = _descend(judges, F.relu(1 - ask(real)).mean() + F.relu(1 + ask(fake.detach())).mean())
        return _descend(makers, -ask(fake).mean()) + second

    return Program((maker, judge), step)


class Denoiser(nn.Module):
    """Says which noise was added, at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.time = (
            nn.Conv2d(1, 8, 3, padding=1),
            nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16)),
        )
        self.norm, self.last = nn.GroupNorm(2, 8), nn.Conv2d(8, 1, 3, padding=1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        kept = torch.cos(time * math.pi / 2)[:, None, None, None]
        angles = time[:, None] * 100 * torch.exp(-torch.arange(4, device=x.device) / 4 * math.log(100))
        scale, shift = self.time(torch.cat([angles.sin(), angles.cos()], 1))[..., None, None].chunk(2, 1)
        h = self.first(kept * x + (1 - kept.square()).sqrt() * noise)
        h = h + self.drop(F.silu(self.norm(h) * (1 + scale) + shift))
        return F.mse_loss(self.last(F.interpolate(F.avg_pool2d(h, 2), scale_factor=2.0)), noise)


def diffusion(wrap: Wrap) -> Program:
    """With a moving average of the parameters."""
    model = Denoiser()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    call = wrap(model)
    optimizer = AdamW(model.parameters(), 2e-3)

    def step(number: int) -> Tensor:
        x, noise = _normal(number, 3, 1, 8, 8), _normal(number + 99, 3, 1, 8, 8)
        loss = _descend(optimizer, call(x, noise, _normal(number, 3).sigmoid()))
        average.update_parameters(model)
        return loss

    return Program((model, average), step)


class Contrast(nn.Module):
    """Two views of each sample are to be alike, and unlike those of others in a queue."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.scale = encoder, nn.Parameter(torch.tensor(2.0))
        self.register_buffer("queue", F.normalize(torch.randn(12, 6), dim=1))

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        found = F.normalize(self.encoder(x), dim=1)
        own, others = (found * keys).sum(1, keepdim=True), found @ self.queue.clone().mT
        scores = torch.cat([own, others], 1) * self.scale.exp().clamp(max=50)
        self.queue.copy_(torch.cat([keys, self.queue])[: len(self.queue)])
        return F.cross_entropy(scores, scores.new_zeros(len(x), dtype=torch.int64))


def contrastive(wrap: Wrap) -> Program:
    """Keys are of an encoder that follows the trained one."""

    def encoder() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))

    model, other = Contrast(encoder()), encoder().requires_grad_(False)
    call, key = wrap(model), wrap(other)
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)

    def step(number: int) -> Tensor:
        x = _normal(number, 6, 10)
        with torch.no_grad():
            keys = F.normalize(key(x + 0.1 * _normal(number + 99, 6, 10)), dim=1)
        loss = _descend(optimizer, call(x, keys))
        with torch.no_grad():
            torch._foreach_lerp_(list(other.parameters()), list(model.encoder.parameters()), 0.1)
        return loss

    return Program((model, other), step)


class Letters(nn.Module):
    """A recurrent network that goes on from where it was."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.rnn, self.head = nn.Embedding(12, 8), nn.LSTM(8, 10, num_layers=2), nn.Linear(10, 12)

    def forward(self, letters: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.rnn(self.letters(letters[:-1]), (h, c))
        return F.cross_entropy(self.head(y).flatten(0, 1), letters[1:].flatten()), h, c


def lstm(wrap: Wrap) -> Program:
    """Backward goes through pieces of a text, each from the state that the one before ended in."""
    model = Letters()
    call = wrap(model)
    optimizer = Adam(model.parameters(), 1e-2)
    state = [torch.zeros(2, 3, 10), torch.zeros(2, 3, 10)]

    def step(number: int) -> Tensor:
        loss, *state[:] = call(_whole(number, 12, 6, 3), *state)
        state[:] = [each.detach() for each in state]
        return _descend(optimizer, loss)

    return Program((model,), step)


class Messages(nn.Module):
    """Nodes send messages along edges, twice; the mean and the greatest of a graph's nodes are what is known of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.send = nn.Linear(5, 8), nn.ModuleList([nn.Linear(16, 8), nn.Linear(16, 8)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(16, 1)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, wanted: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        for send in self.send:
            message = F.elu(send(torch.cat([h[edges[0]], h[edges[1]]], 1)))
            weight = torch.zeros_like(h).index_add(0, edges[1], torch.ones_like(message))
            h = self.norm(h + torch.zeros_like(h).index_add(0, edges[1], message) / weight.clamp(min=1))
        number = graph[:, None].expand_as(h)
        mean = h.new_zeros(3, 8).scatter_reduce(0, number, h, "mean", include_self=False)
        most = h.new_zeros(3, 8).scatter_reduce(0, number, h, "amax", include_self=False)
        return F.smooth_l1_loss(self.head(torch.cat([mean, most], 1))[:, 0], wanted)


def graph_network(wrap: Wrap) -> Program:
    model = Messages()
    call = wrap(model)
    optimizer = Adam(model.parameters(), 1e-2)
    graph = torch.arange(12) % 3
    return Program(
        (model,), lambda n: _descend(optimizer, call(_normal(n, 12, 5), _whole(n, 12, 2, 30), graph, _normal(n, 3)))
    )


class Tables(nn.Module):
    """Bags of rows from tables, and numbers, which meet in products."""

    def __init__(self) -> None:
        super().__init__()
        modes = ("sum", "mean", "max")
        self.tables = nn.ModuleList([nn.EmbeddingBag(15, 6, mode=mode) for mode in modes])
        self.bottom, self.top = nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6 + 6, 1)

    def forward(self, numbers: Tensor, places: Tensor, clicks: Tensor) -> Tensor:
        found = [self.bottom(numbers), *(table(each) for table, each in zip(self.tables, places, strict=True))]
        every = torch.stack(found, 1)
        pairs = torch.bmm(every, every.mT)
        i, j = torch.triu_indices(4, 4, 1, device=every.device)
        scores = self.top(torch.cat([found[0], pairs[:, i, j]], 1))
        return F.binary_cross_entropy_with_logits(scores[:, 0], clicks)


def recommender(wrap: Wrap) -> Program:
    model = Tables()
    call = wrap(model)
    optimizer = torch.optim.Adagrad(model.parameters(), 0.05)

    def step(number: int) -> Tensor:
        clicks = _whole(number, 2, 5).double()
        return _descend(optimizer, call(_normal(number, 5, 4), _whole(number, 15, 3, 5, 4), clicks))

    return Program((model,), step)


class Policy(nn.Module):
    """Clipped ratios of what is done now and was done then, and a value that is clipped around the one of then."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.act, self.value = nn.Sequential(nn.Linear(6, 16), nn.Tanh()), nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, seen: Tensor, done: Tensor, before: Tensor, gain: Tensor, value: Tensor) -> Tensor:
        h = self.body(seen)
        chances = self.act(h).log_softmax(-1)
        ratio = (chances.gather(1, done[:, None])[:, 0] - before).exp()
        gain = (gain - gain.mean()) / (gain.std() + 1e-5)
        policy = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        now = self.value(h)[:, 0]
        near = value + (now - value).clamp(-0.2, 0.2)
        return (
            policy
            + torch.maximum((now - 1).square(), (near - 1).square()).mean()
            + 0.01 * (chances.exp() * chances).sum(-1).mean()
        )


def policy(wrap: Wrap) -> Program:
    model = Policy()
    call = wrap(model)
    optimizer = Adam(model.parameters(), 1e-2, maximize=False)

    def step(number: int) -> Tensor:
        others = -_normal(number, 3, 9).abs()
        loss = call(_normal(number, 9, 6), _whole(number, 4, 9), *others)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.3, foreach=True)
        optimizer.step()
        return loss.detach()

    return Program((model,), step)


class Codes(nn.Module):
    """The nearest of a few codes, on a grid whose step is learnt; gradients pass both choices by."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 4)), nn.Linear(4, 6)
        self.codes, self.grid = nn.Embedding(7, 4), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.tanh(self.encode(x))
        code = self.codes(torch.cdist(found, self.codes.weight).argmin(1))
        steps = (found + (code - found).detach()) / self.grid
        y = self.decode((steps + (steps.round() - steps).detach()).clamp(-8, 7) * self.grid)
        return F.mse_loss(y, x) + F.mse_loss(code, found.detach()) + 0.25 * F.mse_loss(found, code.detach())


def quantised(wrap: Wrap) -> Program:
    model = Codes()
    call = wrap(model)
    optimizer = Adam(model.parameters(), 1e-2)
    return Program((model,), lambda n: _descend(optimizer, call(_normal(n, 9, 6))))


# fmt: off
PROGRAMS: dict[str, Callable[[Wrap], Program]] = {each.__name__: each for each in (
    classifier, segmentation, vit, gpt, llama, t5, moe, vae, gan, diffusion, contrastive, lstm, graph_network, recommender, policy, quantised,
)}
# fmt: on
