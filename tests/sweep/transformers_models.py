"""Architectures of transformers with a few thousand parameters each, called with keywords as users do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import nn

from tests.sweep.entry import Entry, Inputs

_ARCHITECTURES = Path(__file__).with_name("transformers_models.yaml")
_TOKENS = 12
_VOCABULARY = 99  # as in the file of architectures, as are the sizes of images and spectrograms
_PIXELS = 32


def entries() -> list[Entry]:
    """One entry per architecture."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(_ARCHITECTURES.read_text())["architectures"]
    return [Entry("transformers", name, partial(_model, made), _INPUTS[made["inputs"]]) for name, made in found.items()]


def _model(made: dict[str, Any]) -> nn.Module:
    config = getattr(transformers, made["config"])(**copy.deepcopy(made["options"]))
    config._experts_implementation = "eager"  # the other one has no float64
    kind = made.get("model", "AutoModel")
    make = getattr(transformers, kind)
    model: nn.Module = make.from_config(config) if kind.startswith("Auto") else make(config)
    return model


def _text() -> Inputs:
    """Two sentences, the second one padded."""
    mask = torch.ones(2, _TOKENS, dtype=torch.long)
    mask[1, _TOKENS - 3 :] = 0
    return (), {"input_ids": _tokens(_TOKENS), "attention_mask": mask}


def _text_without_mask() -> Inputs:
    return (), {"input_ids": _tokens(_TOKENS)}


def _text_without_cache() -> Inputs:
    return (), _text()[1] | {"use_cache": False}


def _translation() -> Inputs:
    return (), _text_without_cache()[1] | {"decoder_input_ids": _tokens(_TOKENS - 4)}


def _image() -> Inputs:
    return (), {"pixel_values": torch.randn(2, 3, _PIXELS, _PIXELS)}


def _image_and_text() -> Inputs:
    return (), _text()[1] | _image()[1]


def _sound() -> Inputs:
    return (), {"input_values": torch.randn(2, 1600)}


def _spectrogram() -> Inputs:
    return (), {"input_features": torch.randn(2, 16, 40), "decoder_input_ids": _tokens(6), "use_cache": False}


def _tokens(count: int) -> torch.Tensor:
    return torch.randint(3, _VOCABULARY, (2, count))  # the first three are special


_INPUTS: dict[str, Callable[[], Inputs]] = {
    function.__name__.removeprefix("_"): function
    for function in (
        _text,
        _text_without_mask,
        _text_without_cache,
        _translation,
        _image,
        _image_and_text,
        _sound,
        _spectrogram,
    )
}
