"""Architectures of transformers as they are trained: with labels, so that forward gives a loss, and once more with checkpoints of activations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
import yaml
from torch import nn

from tests.sweep.entry import Entry, Inputs
from tests.sweep.transformers_models import _ARCHITECTURES, _INPUTS

_CLASSES = (
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModelForCTC",
)


def entries() -> list[Entry]:
    """Two entries per architecture that has a class with a loss."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(_ARCHITECTURES.read_text())["architectures"]
    return [entry for name, made in found.items() if "model" not in made for entry in _of(name, made)]


def _of(name: str, made: dict[str, Any]) -> Iterator[Entry]:
    kind = getattr(transformers, made["config"])
    auto = next((each for each in _CLASSES if kind in getattr(transformers, each)._model_mapping), None)
    if auto is None:
        return
    for suffix, checkpoints in (("labels", False), ("checkpoints", True)):
        make = partial(_model, made, auto, checkpoints)
        yield Entry("transformers_losses", f"{name}-{suffix}", make, partial(_labelled, auto, _INPUTS[made["inputs"]]))


def _model(made: dict[str, Any], auto: str, checkpoints: bool) -> nn.Module:
    config = getattr(transformers, made["config"])(**copy.deepcopy(made["options"]))
    config._experts_implementation = "eager"
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = 1
    model: nn.Module = getattr(transformers, auto).from_config(config)
    if checkpoints and model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def _labelled(auto: str, inputs: Callable[[], Inputs]) -> Inputs:
    args, kwargs = inputs()
    kwargs.pop("use_cache", None)
    if "Seq2Seq" in auto:
        kwargs["labels"] = kwargs.pop("decoder_input_ids")
    elif auto == "AutoModelForImageClassification":
        kwargs["labels"] = torch.tensor([0, 1])
    elif auto == "AutoModelForCTC":
        kwargs["labels"] = torch.randint(1, 9, (2, 5))
    else:
        kwargs["labels"] = kwargs["input_ids"].clone()
        kwargs["labels"][0, :3] = -100
    return args, kwargs
