"""Models of transformers generate the same tokens when they are optimised, by few graphs: `pytest -m recipes tests/recipes`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusepass

pytestmark = pytest.mark.recipes

transformers = pytest.importorskip("transformers")

WORDS = 64
SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": WORDS, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def gpt2() -> Any:
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        vocab_size=WORDS,
        n_positions=256,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def mistral() -> Any:
    """A window of eight tokens slides over the sequence."""
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=8))


def t5() -> Any:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=WORDS,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


WAYS = {
    "greedy": {"do_sample": False},
    "static": {"do_sample": False, "cache_implementation": "static"},
    "sampled": {"do_sample": True},
    "beams": {"do_sample": False, "num_beams": 2},
}
CASES = [
    (gpt2, "sampled", 1), (llama, "greedy", 1), (llama, "greedy", 3), (llama, "static", 1), (llama, "beams", 1), (mistral, "greedy", 3),
    (t5, "greedy", 1),
]  # fmt: skip


@pytest.mark.parametrize(("make", "way", "batch"), CASES, ids=[f"{make.__name__}-{way}-{n}" for make, way, n in CASES])
def test_tokens_are_eager_s(make: Callable[[], Any], way: str, batch: int) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)  # so that tokens differ in probability by more than roundings
    tokens = torch.randint(3, WORDS, (batch, 7))
    seen = torch.ones_like(tokens)
    if batch > 1:
        tokens[0, :3], seen[0, :3] = 0, 0
    how = {"attention_mask": seen, "max_new_tokens": 20, "disable_compile": True, **WAYS[way]}

    def generated(which: Any) -> Any:
        torch.manual_seed(1)
        return which.generate(tokens, **how)

    expected, fused = generated(model), fusepass.optimize(model, tune="off")
    assert torch.equal(generated(fused), expected)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs <= 6
    assert torch.equal(generated(fused), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert fused.report().ops_fused > 0
