"""Architectures of the package ``transformers``, small and with random weights.

Nothing of it is needed to develop Offramp: where it is not installed, these are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = 5

_TEXT = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
    "num_labels": CLASSES,
    "pad_token_id": 0,
}
_IMAGE = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_labels": CLASSES,
}
_DISTIL = {"dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 64, "vocab_size": 50}
_GPT = {"n_embd": 32, "n_layer": 3, "n_head": 2, "vocab_size": 50, "n_positions": 80}
_NAMED = {"num_labels": CLASSES, "pad_token_id": 0}
_SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}

_TEXTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "BERT (transformers)": ("Bert", _TEXT),
    "DistilBERT": ("DistilBert", {**_DISTIL, **_NAMED}),
    "RoBERTa": ("Roberta", _TEXT),
    "ALBERT": ("Albert", {**_TEXT, "embedding_size": 16}),
    "ELECTRA": ("Electra", {**_TEXT, "embedding_size": 16}),
    "DeBERTa": ("DebertaV2", {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "ModernBERT": ("ModernBert", {**_TEXT, "reference_compile": False}),
    "GPT-2 (transformers)": ("GPT2", {**_GPT, **_NAMED}),
    "Llama (transformers)": ("Llama", {**_TEXT, "num_key_value_heads": 2}),
}
IMAGES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ViT (transformers)": ("ViT", _IMAGE),
    "DeiT": ("DeiT", _IMAGE),
    "Swin (transformers)": ("Swin", {**_SWIN, "window_size": 4, "num_labels": CLASSES}),
    "ConvNeXt (transformers)": (
        "ConvNext",
        {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "num_labels": CLASSES},
    ),
    "ResNet (transformers)": (
        "ResNet",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "num_labels": CLASSES},
    ),
    "RegNet (transformers)": (
        "RegNet",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [2, 2],
            "groups_width": 4,
            "num_labels": CLASSES,
        },
    ),
    "MobileViT": ("MobileViT", {"image_size": 64, "num_labels": CLASSES}),
    "CLIP vision": ("CLIP", {"vision_config": _IMAGE, "num_labels": CLASSES}),
}


_WAVES = {
    **_IMAGE,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
}
_WHISPER = {
    "d_model": 32,
    "encoder_layers": 3,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "num_labels": CLASSES,
    "vocab_size": 50,
    "pad_token_id": 0,
}
_SPECTRUM = {**_IMAGE, "patch_size": 8, "max_length": 32, "num_mel_bins": 16}
_T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 3, "num_heads": 2}


class Answered(nn.Module):
    """A classifier of the package that gives its logits alone."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, first: Tensor, second: Tensor | None = None) -> Tensor:
        given = zip(self.names, (first, second), strict=False)
        return self.model(**dict(given)).logits


class Averaged(nn.Module):
    """The mean of an encoder's tokens, as sentence transformers take it, and a linear layer."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model, self.head = model, nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        tokens = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        kept = mask[..., None].to(tokens.dtype)
        return self.head((tokens * kept).sum(1) / kept.sum(1).clamp(min=1e-9))


def texts() -> dict[str, Callable[[], nn.Module]]:
    """Classifiers of ids and a mask."""
    named = {name: _text(*settings) for name, settings in _TEXTS.items()}
    encoders = {
        "MiniLM": lambda: Averaged(_made("BertModel", "Bert", _TEXT), 32),
        "T5 encoder": lambda: Averaged(_made("T5EncoderModel", "T5", _T5), 32),
    }
    return named | encoders


def _text(kind: str, settings: Mapping[str, Any]) -> Callable[[], nn.Module]:
    made = f"{kind}ForSequenceClassification"
    return lambda: Answered(_made(made, kind, settings), ("input_ids", "attention_mask"))


def image(kind: str, settings: Mapping[str, Any]) -> Callable[[], nn.Module]:
    made = f"{kind}ForImageClassification"
    return lambda: Answered(_made(made, kind, settings), ("pixel_values",))


def _audio(kind: str, task: str, settings: Mapping[str, Any], name: str) -> Callable[[], nn.Module]:
    return lambda: Answered(_made(f"{kind}{task}", kind, settings), (name,))


_SEQUENCE, _SOUND = "ForSequenceClassification", "ForAudioClassification"
AUDIO: Mapping[str, tuple[Callable[[], nn.Module], int | tuple[int, ...]]] = {
    "wav2vec 2.0": (_audio("Wav2Vec2", _SEQUENCE, _WAVES, "input_values"), 800),
    "HuBERT": (_audio("Hubert", _SEQUENCE, _WAVES, "input_values"), 800),
    "AST": (_audio("AST", _SOUND, _SPECTRUM, "input_values"), (32, 16)),
    "Whisper encoder": (_audio("Whisper", _SOUND, _WHISPER, "input_features"), (8, 40)),
}
"""Classifiers of sound: samples of a signal, or the sizes of a spectrogram."""


def _made(name: str, kind: str, settings: Mapping[str, Any]) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**settings)
    config.return_dict = True
    if hasattr(config, "use_cache"):
        config.use_cache = False
    torch.manual_seed(0)
    return getattr(transformers, name)(config)
