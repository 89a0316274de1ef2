"""Networks of torchvision, timm and transformers, and some of our own, with random weights: what people train and serve, as data.

A network is made only when it is asked for, so that the packages are needed by whoever runs it alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Network:
    """A network and the inputs that it is measured with.

    Attributes:
        package: where its constructor comes from, or the module there.
        maker: the constructor's path in that package, or timm's name of a model.
        shape: of the input: images, or, where `vocabulary` is given, whole numbers below it.
        weights: the type of weights and inputs.
        autocast: the type that the forward pass is cast to, if any.
        channels_last: weights and images are channels last.
        train: a step of training is measured; otherwise a call without gradients.
        batch_statistics: an inference call in training mode.
        options: for the constructor, or for transformers' configuration.
    """

    name: str
    package: str
    maker: str
    shape: tuple[int, ...]
    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    channels_last: bool = False
    train: bool = False
    batch_statistics: bool = False
    vocabulary: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def model(self, device: torch.device) -> nn.Module:
        """The network with random weights, the same ones each time."""
        torch.manual_seed(0)
        with torch.device(device):
            made = _MAKERS[self.package.partition(".")[0]](self.package, self.maker, self.options)
        made = made.to(dtype=self.weights).train(self.train or self.batch_statistics)
        return made.to(memory_format=torch.channels_last) if self.channels_last else made

    def input(self, device: torch.device) -> Tensor:
        """New random numbers in [0, 1), or places in the vocabulary."""
        if self.vocabulary:
            return torch.randint(self.vocabulary, self.shape, device=device)
        x = torch.rand(self.shape, device=device, dtype=self.weights)
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last else x

    def casting(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context in which forward runs."""
        return nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)


def _made(package: str, maker: str, options: Mapping[str, Any]) -> nn.Module:
    module = "torchvision.models" if package == "torchvision" else package
    made: nn.Module = getattr(importlib.import_module(module), maker)(**options)
    return made


def _timm(package: str, maker: str, options: Mapping[str, Any]) -> nn.Module:
    made: nn.Module = importlib.import_module(package).create_model(maker, **options)
    return made


class _First(nn.Module):
    """A model of transformers as a function of its first argument to its first result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model(x)[0]
        return result


def _transformers(package: str, maker: str, options: Mapping[str, Any]) -> nn.Module:
    model_type = getattr(importlib.import_module(package), maker)
    return _First(model_type(model_type.config_class(**options)))


_MAKERS: Mapping[str, Callable[[str, str, Mapping[str, Any]], nn.Module]] = {
    "torchvision": _made,
    "benchmarks": _made,
    "timm": _timm,
    "transformers": _transformers,
}

_BFLOAT, _HALF = torch.bfloat16, torch.float16
_IMAGES = (64, 3, 224, 224)
_GPT2 = {"use_cache": False}
_LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "use_cache": False,
}
_WHISPER = "transformers.models.whisper.modeling_whisper"
_CONFORMER = {
    "num_hidden_layers": 6,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "apply_spec_augment": False,
}
_FPN = {"backbone_name": "resnet50", "weights": None}
_PLAIN = {"weights": None, "init_weights": False, "aux_logits": False}

# fmt: off
INFERENCE = (
    Network("resnet50", "torchvision", "resnet50", _IMAGES, _BFLOAT, channels_last=True),
    Network("resnet50_half", "torchvision", "resnet50", _IMAGES, _HALF, channels_last=True),
    Network("vit_base", "timm", "vit_base_patch16_224", _IMAGES, _BFLOAT),
    Network("gpt2", "transformers", "GPT2LMHeadModel", (1, 64), _BFLOAT, vocabulary=50257, options=_GPT2),
    Network("mobilenetv3_large", "timm", "mobilenetv3_large_100", (128, 3, 224, 224), _BFLOAT, channels_last=True),
    Network("swin_tiny", "timm", "swin_tiny_patch4_window7_224", _IMAGES, _BFLOAT),
    Network("efficientnet_b0", "torchvision", "efficientnet_b0", _IMAGES, _BFLOAT, channels_last=True),
    Network("convnext_tiny", "torchvision", "convnext_tiny", _IMAGES, _BFLOAT, channels_last=True),
    Network("bert", "transformers", "BertModel", (16, 256), _BFLOAT, vocabulary=30522, options={"attn_implementation": "sdpa"}),
    Network("llama", "transformers", "LlamaForCausalLM", (1, 512), _BFLOAT, vocabulary=32000, options=_LLAMA),
    Network("llama_token", "transformers", "LlamaForCausalLM", (1, 1), _BFLOAT, vocabulary=32000, options=_LLAMA),
    Network("t5_encoder", "transformers", "T5EncoderModel", (16, 256), _BFLOAT, vocabulary=32128),
    Network("whisper_encoder", _WHISPER, "WhisperEncoder", (4, 80, 3000), _HALF),
    Network("conformer", "transformers", "Wav2Vec2ConformerModel", (4, 80000), _HALF, options=_CONFORMER),
    Network("fpn", "torchvision.models.detection.backbone_utils", "resnet_fpn_backbone", (4, 3, 640, 640), _HALF, channels_last=True, options=_FPN),
    Network("unet_part", "benchmarks.diffusion", "UNetPart", (8, 320, 64, 64), _BFLOAT, channels_last=True),
    Network("vae_decoder", "benchmarks.diffusion", "Decoder", (2, 4, 64, 64), _HALF, channels_last=True),
    Network("resnet50_one", "torchvision", "resnet50", (1, 3, 224, 224), _BFLOAT, channels_last=True),
    Network("vit_base_one", "timm", "vit_base_patch16_224", (1, 3, 224, 224), _BFLOAT),
    Network("densenet121", "torchvision", "densenet121", (10, 3, 224, 224), batch_statistics=True),
    Network("densenet201", "torchvision", "densenet201", (10, 3, 224, 224), batch_statistics=True),
    Network("googlenet", "torchvision", "googlenet", (10, 3, 224, 224), batch_statistics=True, options=_PLAIN),
)
TRAINING = (
    Network("resnet50", "torchvision", "resnet50", _IMAGES, autocast=_BFLOAT, channels_last=True, train=True),
    Network("vit_small", "timm", "vit_small_patch16_224", _IMAGES, autocast=_BFLOAT, train=True),
    Network("gpt2", "transformers", "GPT2LMHeadModel", (8, 512), _BFLOAT, autocast=_BFLOAT, train=True, vocabulary=50257, options=_GPT2),
    Network("gpt2_float", "transformers", "GPT2LMHeadModel", (8, 512), autocast=_BFLOAT, train=True, vocabulary=50257, options=_GPT2),
    Network("convnext_tiny", "torchvision", "convnext_tiny", (32, 3, 224, 224), autocast=_BFLOAT, train=True),
    Network("bert", "transformers", "BertModel", (16, 256), autocast=_BFLOAT, train=True, vocabulary=30522),
    Network("efficientnet_b0", "torchvision", "efficientnet_b0", _IMAGES, autocast=_BFLOAT, channels_last=True, train=True),
    Network("swin_tiny", "timm", "swin_tiny_patch4_window7_224", (32, 3, 224, 224), autocast=_BFLOAT, train=True),
    Network("llama", "transformers", "LlamaForCausalLM", (4, 512), autocast=_BFLOAT, train=True, vocabulary=32000, options=_LLAMA),
    Network("unet_part", "benchmarks.diffusion", "UNetPart", (4, 320, 64, 64), autocast=_BFLOAT, channels_last=True, train=True),
)
# fmt: on
