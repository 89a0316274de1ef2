"""Architectures of transformers, each by a configuration of a few thousand parameters, called with keywords as users do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.sweep.entry import Entry, Inputs, declare_torchvision_operators

_TOKENS = 12
_VOCABULARY = 99
_PIXELS = 32

_ENCODER = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}
_DECODER = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT = {"vocab_size": _VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_SEQ2SEQ = {
    "vocab_size": _VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
_VISION = {
    "image_size": _PIXELS,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def _text() -> Inputs:
    mask = torch.ones(2, _TOKENS, dtype=torch.long)
    mask[1, _TOKENS - 3 :] = 0
    return (), {"input_ids": torch.randint(3, _VOCABULARY, (2, _TOKENS)), "attention_mask": mask}


def _text_without_mask() -> Inputs:
    return (), {"input_ids": torch.randint(3, _VOCABULARY, (2, _TOKENS))}


def _text_without_cache() -> Inputs:
    args, kwargs = _text()
    return args, {**kwargs, "use_cache": False}


def _translation() -> Inputs:
    args, kwargs = _text_without_cache()
    return args, {**kwargs, "decoder_input_ids": torch.randint(3, _VOCABULARY, (2, _TOKENS - 4))}


def _image() -> Inputs:
    return (), {"pixel_values": torch.randn(2, 3, _PIXELS, _PIXELS)}


def _image_and_text() -> Inputs:
    return (), _text()[1] | _image()[1]


def _sound() -> Inputs:
    return (), {"input_values": torch.randn(2, 1600)}


def _spectrogram() -> Inputs:
    return (), {
        "input_features": torch.randn(2, 16, 40),
        "decoder_input_ids": torch.randint(3, _VOCABULARY, (2, 6)),
        "use_cache": False,
    }


@dataclass(frozen=True)
class _Architecture:
    """What `transformers` calls configuration and model, and how small it is made."""

    config: str
    options: dict[str, Any]
    inputs: Callable[[], Inputs]
    model: str = "AutoModel"
    extra: dict[str, Any] = field(default_factory=dict)


_ARCHITECTURES: dict[str, _Architecture] = {
    # encoders of text
    "bert": _Architecture("BertConfig", _ENCODER, _text),
    "bert-masked-lm": _Architecture("BertConfig", _ENCODER, _text, "AutoModelForMaskedLM"),
    "bert-classifier": _Architecture("BertConfig", _ENCODER, _text, "AutoModelForSequenceClassification"),
    "roberta": _Architecture("RobertaConfig", _ENCODER, _text),
    "electra": _Architecture("ElectraConfig", _ENCODER, _text, extra={"embedding_size": 32}),
    "albert": _Architecture("AlbertConfig", _ENCODER, _text, extra={"embedding_size": 16}),
    "camembert": _Architecture("CamembertConfig", _ENCODER, _text),
    "roformer": _Architecture("RoFormerConfig", _ENCODER, _text),
    "deberta-v2": _Architecture(
        "DebertaV2Config",
        _ENCODER,
        _text,
        extra={"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    ),
    "mpnet": _Architecture("MPNetConfig", _ENCODER, _text),
    "distilbert": _Architecture(
        "DistilBertConfig",
        {
            "vocab_size": _VOCABULARY,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 48,
            "max_position_embeddings": 64,
        },
        _text,
    ),
    "convbert": _Architecture("ConvBertConfig", _ENCODER, _text, extra={"embedding_size": 32}),
    "squeezebert": _Architecture(
        "SqueezeBertConfig",
        _ENCODER,
        _text,
        extra={
            "embedding_size": 32,
            "q_groups": 2,
            "k_groups": 2,
            "v_groups": 2,
            "post_attention_groups": 2,
            "intermediate_groups": 4,
            "output_groups": 1,
            "intermediate_size": 64,
        },
    ),
    "fnet": _Architecture("FNetConfig", _ENCODER, _text_without_mask),
    "funnel": _Architecture(
        "FunnelConfig",
        {"vocab_size": _VOCABULARY, "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48},
        _text,
        "FunnelModel",
    ),
    "xlnet": _Architecture(
        "XLNetConfig", {"vocab_size": _VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}, _text
    ),
    "nystromformer": _Architecture(
        "NystromformerConfig", _ENCODER, _text, extra={"num_landmarks": 12, "segment_means_seq_len": 12}
    ),
    "modernbert": _Architecture(
        "ModernBertConfig", {k: v for k, v in _DECODER.items() if k != "num_key_value_heads"}, _text
    ),
    "longformer": _Architecture("LongformerConfig", _ENCODER, _text, extra={"attention_window": 4}),
    "big_bird": _Architecture("BigBirdConfig", _ENCODER, _text, extra={"attention_type": "original_full"}),
    "mobilebert": _Architecture(
        "MobileBertConfig",
        _ENCODER,
        _text,
        extra={"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    ),
    "layoutlm": _Architecture("LayoutLMConfig", _ENCODER, _text),
    "canine": _Architecture(
        "CanineConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "max_position_embeddings": 64,
            "num_hash_buckets": 64,
            "local_transformer_stride": 4,
            "downsampling_rate": 4,
        },
        _text,
    ),
    # decoders of text
    "gpt2": _Architecture("GPT2Config", _GPT, _text_without_cache),
    "gpt2-lm": _Architecture("GPT2Config", _GPT, _text_without_cache, "AutoModelForCausalLM"),
    "gpt2-cache": _Architecture("GPT2Config", _GPT, _text),
    "gptj": _Architecture("GPTJConfig", _GPT, _text_without_cache, extra={"rotary_dim": 4}),
    "codegen": _Architecture("CodeGenConfig", _GPT, _text_without_cache, extra={"rotary_dim": 4}),
    "gpt-neo": _Architecture(
        "GPTNeoConfig",
        {
            "vocab_size": _VOCABULARY,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
        },
        _text_without_cache,
    ),
    "gpt-neox": _Architecture(
        "GPTNeoXConfig", {k: v for k, v in _DECODER.items() if k != "num_key_value_heads"}, _text_without_cache
    ),
    "gpt-bigcode": _Architecture("GPTBigCodeConfig", _GPT, _text_without_cache),
    "opt": _Architecture(
        "OPTConfig",
        {
            "vocab_size": _VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
        },
        _text_without_cache,
    ),
    "bloom": _Architecture(
        "BloomConfig", {"vocab_size": _VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}, _text_without_cache
    ),
    "mpt": _Architecture(
        "MptConfig",
        {"vocab_size": _VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
        _text_without_cache,
    ),
    "llama": _Architecture("LlamaConfig", _DECODER, _text_without_cache),
    "llama-lm": _Architecture("LlamaConfig", _DECODER, _text_without_cache, "AutoModelForCausalLM"),
    "llama-cache": _Architecture("LlamaConfig", _DECODER, _text, "AutoModelForCausalLM"),
    "mistral": _Architecture("MistralConfig", _DECODER, _text_without_cache, extra={"sliding_window": 4}),
    "qwen2": _Architecture("Qwen2Config", _DECODER, _text_without_cache),
    "qwen3": _Architecture("Qwen3Config", _DECODER, _text_without_cache, extra={"head_dim": 8}),
    "gemma": _Architecture("GemmaConfig", _DECODER, _text_without_cache, extra={"head_dim": 8}),
    "gemma2": _Architecture("Gemma2Config", _DECODER, _text_without_cache, extra={"head_dim": 8, "sliding_window": 4}),
    "gemma3": _Architecture(
        "Gemma3TextConfig", _DECODER, _text_without_cache, extra={"head_dim": 8, "sliding_window": 4}
    ),
    "phi": _Architecture("PhiConfig", _DECODER, _text_without_cache),
    "phi3": _Architecture("Phi3Config", _DECODER, _text_without_cache),
    "falcon": _Architecture(
        "FalconConfig",
        {"vocab_size": _VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        _text_without_cache,
    ),
    "falcon-alibi": _Architecture(
        "FalconConfig",
        {"vocab_size": _VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
        _text_without_cache,
    ),
    "stablelm": _Architecture("StableLmConfig", _DECODER, _text_without_cache),
    "olmo2": _Architecture("Olmo2Config", _DECODER, _text_without_cache),
    "granite": _Architecture("GraniteConfig", _DECODER, _text_without_cache),
    "cohere": _Architecture("CohereConfig", _DECODER, _text_without_cache),
    "starcoder2": _Architecture("Starcoder2Config", _DECODER, _text_without_cache),
    "mixtral": _Architecture("MixtralConfig", _DECODER, _text_without_cache, extra={"num_local_experts": 4}),
    "qwen3-moe": _Architecture(
        "Qwen3MoeConfig",
        _DECODER,
        _text_without_cache,
        extra={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "mamba": _Architecture(
        "MambaConfig",
        {"vocab_size": _VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        _text_without_cache,
    ),
    "mamba2": _Architecture(
        "Mamba2Config",
        {
            "vocab_size": _VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 4,
            "num_heads": 8,
            "head_dim": 8,
            "expand": 2,
            "n_groups": 1,
            "chunk_size": 4,
        },
        _text_without_cache,
    ),
    "rwkv": _Architecture(
        "RwkvConfig",
        {
            "vocab_size": _VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "attention_hidden_size": 32,
            "context_length": 64,
        },
        _text_without_cache,
    ),
    "recurrent-gemma": _Architecture(
        "RecurrentGemmaConfig",
        {**_DECODER, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
        _text_without_cache,
    ),
    "ctrl": _Architecture(
        "CTRLConfig",
        {"vocab_size": _VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48, "n_positions": 64},
        _text_without_cache,
    ),
    # encoders with decoders
    "t5": _Architecture(
        "T5Config",
        {"vocab_size": _VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        _translation,
    ),
    "bart": _Architecture("BartConfig", _SEQ2SEQ, _translation),
    "mbart": _Architecture("MBartConfig", _SEQ2SEQ, _translation),
    "pegasus": _Architecture("PegasusConfig", _SEQ2SEQ, _translation),
    "marian": _Architecture("MarianConfig", _SEQ2SEQ, _translation, extra={"pad_token_id": 0}),
    "m2m100": _Architecture("M2M100Config", _SEQ2SEQ, _translation),
    "led": _Architecture(
        "LEDConfig",
        {
            **_SEQ2SEQ,
            "attention_window": 4,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
        _translation,
    ),
    # images
    "vit": _Architecture("ViTConfig", _VISION, _image),
    "vit-classifier": _Architecture("ViTConfig", _VISION, _image, "AutoModelForImageClassification"),
    "deit": _Architecture("DeiTConfig", _VISION, _image),
    "beit": _Architecture(
        "BeitConfig", _VISION, _image, extra={"use_relative_position_bias": True, "out_indices": [1, 2]}
    ),
    "dinov2": _Architecture("Dinov2Config", _VISION, _image),
    "siglip-vision": _Architecture("SiglipVisionConfig", _VISION, _image),
    "vit-mae": _Architecture("ViTMAEConfig", _VISION, _image),
    "swin": _Architecture(
        "SwinConfig",
        {
            "image_size": _PIXELS,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        _image,
    ),
    "swinv2": _Architecture(
        "Swinv2Config",
        {
            "image_size": _PIXELS,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        _image,
    ),
    "convnext": _Architecture("ConvNextConfig", {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 2, 1]}, _image),
    "resnet": _Architecture(
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic"},
        _image,
    ),
    "mobilenet-v2": _Architecture("MobileNetV2Config", {"depth_multiplier": 0.35}, _image),
    "mobilevit": _Architecture(
        "MobileViTConfig",
        {"image_size": _PIXELS, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64]},
        _image,
    ),
    "regnet": _Architecture(
        "RegNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "groups_width": 8},
        _image,
    ),
    "segformer": _Architecture(
        "SegformerConfig",
        {
            "hidden_sizes": [8, 16, 16, 32],
            "num_attention_heads": [1, 2, 2, 4],
            "depths": [1, 1, 1, 1],
            "decoder_hidden_size": 16,
        },
        _image,
        "AutoModelForSemanticSegmentation",
    ),
    "poolformer": _Architecture("PoolFormerConfig", {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}, _image),
    "pvt": _Architecture(
        "PvtConfig",
        {
            "image_size": _PIXELS,
            "hidden_sizes": [8, 16, 16, 32],
            "num_attention_heads": [1, 2, 2, 4],
            "depths": [1, 1, 1, 1],
        },
        _image,
    ),
    "cvt": _Architecture("CvtConfig", {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}, _image),
    "efficientnet": _Architecture(
        "EfficientNetConfig",
        {"image_size": _PIXELS, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
        _image,
    ),
    "dpt": _Architecture(
        "DPTConfig",
        {
            **_VISION,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 16,
        },
        _image,
        "AutoModelForDepthEstimation",
    ),
    # text and images
    "clip": _Architecture(
        "CLIPConfig",
        {"text_config": {**_ENCODER, "eos_token_id": 2}, "vision_config": _VISION, "projection_dim": 16},
        _image_and_text,
    ),
    "siglip": _Architecture("SiglipConfig", {"text_config": _ENCODER, "vision_config": _VISION}, _image_and_text),
    "blip": _Architecture(
        "BlipConfig", {"text_config": _ENCODER, "vision_config": _VISION, "projection_dim": 16}, _image_and_text
    ),
    "vilt": _Architecture("ViltConfig", {**_ENCODER, **_VISION}, _image_and_text),
    # sound
    "whisper": _Architecture(
        "WhisperConfig",
        {
            **_SEQ2SEQ,
            "num_mel_bins": 16,
            "max_source_positions": 20,
            "max_target_positions": 20,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        _spectrogram,
    ),
    "wav2vec2": _Architecture(
        "Wav2Vec2Config",
        {
            **_ENCODER,
            "conv_dim": [16, 16],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 8],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
        },
        _sound,
    ),
    "hubert": _Architecture(
        "HubertConfig",
        {
            **_ENCODER,
            "conv_dim": [16, 16],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 8],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
        },
        _sound,
    ),
    "wavlm": _Architecture(
        "WavLMConfig",
        {
            **_ENCODER,
            "conv_dim": [16, 16],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 8],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
        },
        _sound,
    ),
}


def entries() -> list[Entry]:
    """One entry per architecture."""
    declare_torchvision_operators()
    return [Entry("transformers", name, partial(_model, made), made.inputs) for name, made in _ARCHITECTURES.items()]


def _model(made: _Architecture) -> nn.Module:
    import transformers

    config = getattr(transformers, made.config)(**{**made.options, **made.extra})
    kind = getattr(transformers, made.model)
    model: nn.Module = kind.from_config(config) if made.model.startswith("Auto") else kind(config)
    return model
