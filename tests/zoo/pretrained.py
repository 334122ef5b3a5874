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

TEXTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
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
}


class Answered(nn.Module):
    """A classifier of the package that gives its logits alone."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, first: Tensor, second: Tensor | None = None) -> Tensor:
        given = zip(self.names, (first, second), strict=False)
        return self.model(**dict(given)).logits


def text(kind: str, settings: Mapping[str, Any]) -> Callable[[], nn.Module]:
    return lambda: Answered(
        _made(kind, "ForSequenceClassification", settings), ("input_ids", "attention_mask")
    )


def image(kind: str, settings: Mapping[str, Any]) -> Callable[[], nn.Module]:
    return lambda: Answered(_made(kind, "ForImageClassification", settings), ("pixel_values",))


def _made(kind: str, task: str, settings: Mapping[str, Any]) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**settings)
    config.return_dict = True
    if hasattr(config, "use_cache"):
        config.use_cache = False
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}{task}")(config)
    if kind == "MobileViT":  # as it is initialised, its answers are of the order of 1e-41
        for weight in model.parameters():
            if weight.ndim > 1:
                nn.init.kaiming_normal_(weight)
    return model
