"""A small GPT-2 (Radford et al., 2019) learns a sequence: the same steps in eager mode and through the torch.compile backend.

`python examples/gpt2_training.py [cpu|cuda]`
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a LayerNorm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.mlp(self.norm2(x))


class GPT2(nn.Module):
    """int64[N, T] -> the mean loss of each token's guess at the next one."""

    def __init__(self, words: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        logits = self.norm(self.blocks(x)) @ self.words.weight.T
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(call: Callable[[Tensor], Any], model: nn.Module, batches: Tensor) -> list[float]:
    """The loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for tokens in batches:
        loss = call(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(device: str, *, small: bool = False) -> bool:
    """Trains both and says whether their losses agree; `small` for tests."""
    torch.manual_seed(0)
    sizes = (20, 12, 16, 1, 2) if small else (1000, 256, 256, 6, 8)
    model = GPT2(*sizes).to(device)
    twin = copy.deepcopy(model)
    steps, batch = (3, 2) if small else (20, 8)
    start = torch.randint(sizes[0], (steps, batch, 1), device=device)
    batches = (start + torch.arange(sizes[1], device=device)) % sizes[0]
    losses = {}
    for name, own, call in (("eager", model, model), ("fusepass", twin, torch.compile(twin, backend="fusepass"))):
        begun = time.perf_counter()
        losses[name] = train(call, own, batches)
        seconds = time.perf_counter() - begun
        print(f"{name}: loss {losses[name][0]:.4f} to {losses[name][-1]:.4f} in {seconds:.2f} s, compilers included")
    return bool(torch.allclose(*map(torch.tensor, losses.values()), rtol=1e-3))


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"))
