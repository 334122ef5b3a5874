"""Architectures of the packages ``timm`` and ``torchvision``, as small as they can be made.

Nothing of it is needed to develop Offramp: where one is not installed, its models are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

CLASSES = 5
Published = tuple[str, Callable[[], nn.Module], int]
"""Package, how the model is made, side of its images."""


def _timm(name: str, side: int, **settings: Any) -> Published:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=CLASSES, **settings)

    return "timm", make, side


def _timm_class(module: str, name: str, side: int, **settings: Any) -> Published:
    def make() -> nn.Module:
        import timm

        kind = getattr(getattr(timm.models, module), name)
        return kind(num_classes=CLASSES, **settings)

    return "timm", make, side


def _torchvision(name: str, side: int, **settings: Any) -> Published:
    def make() -> nn.Module:
        import torchvision

        return getattr(torchvision.models, name)(num_classes=CLASSES, **settings)

    return "torchvision", make, side


_PATCHES = {"img_size": 32, "patch_size": 8, "embed_dim": 32}
_WINDOWS = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16}
_OLD = {"init_weights": False, "aux_logits": False}

IMAGES: Mapping[str, Published] = {
    "ResNet (timm)": _timm("test_resnet", 64),
    "DenseNet (timm)": _timm_class("densenet", "DenseNet", 64, growth_rate=4, block_config=(2, 2)),
    "GoogLeNet (torchvision)": _torchvision("GoogLeNet", 64, **_OLD),
    "Inception v3 (torchvision)": _torchvision("Inception3", 80, **_OLD),
    "SqueezeNet (torchvision)": _torchvision("squeezenet1_1", 64),
    "ShuffleNet v2 (torchvision)": _torchvision("shufflenet_v2_x0_5", 64),
    "MobileNetV2 (torchvision)": _torchvision("mobilenet_v2", 64, width_mult=0.25),
    "MobileNetV3 (timm)": _timm("mobilenetv3_small_050", 64),
    "EfficientNet (timm)": _timm("test_efficientnet", 64),
    "RegNet (timm)": _timm("regnetx_002", 64),
    "ConvNeXt (timm)": _timm("test_convnext", 64),
    "NFNet (timm)": _timm("test_nfnet", 64),
    "ViT (timm)": _timm("test_vit", 32, img_size=32),
    "DeiT (timm)": _timm_class(
        "deit", "VisionTransformerDistilled", 32, depth=3, num_heads=2, **_PATCHES
    ),
    "Swin (timm)": _timm_class(
        "swin_transformer", "SwinTransformer", 32, depths=(2, 2), num_heads=(2, 4), **_WINDOWS
    ),
    "MaxViT (timm)": _timm("test_maxvit", 64, img_size=64),
    "CoAtNet (timm)": _timm("test_coatnet", 64, img_size=64),
    "MobileViT (timm)": _timm("mobilevitv2_050", 64),
    "MLP-Mixer (timm)": _timm_class("mlp_mixer", "MlpMixer", 32, num_blocks=3, **_PATCHES),
}
