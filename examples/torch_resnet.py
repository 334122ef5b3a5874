"""A small ResNet in torch: trained, compiled with exits, and called in the same process.

    python -m examples.torch_resnet

Takes some minutes, most of them for training.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import offramp


class ConvolutionBlock(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        conv = [nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)]
        norm = [nn.BatchNorm2d(width) for _ in range(2)]
        self.inner = nn.Sequential(conv[0], norm[0], nn.ReLU(), conv[1], norm[1])

    def forward(self, x: Tensor) -> Tensor:
        """Return [b, width, h, w] from the same shape."""
        return (x + self.inner(x)).relu()


def main(
    output: Path = Path("resnet.ee"),
    *,
    images: int = 20_000,
    blocks: int = 12,
    max_disagreement: float = 0.01,
) -> offramp.Bundle:
    """Train on one half of the images, and compile with the other, which the model has not seen."""
    with np.load(Path(__file__).parent / "fashion" / "calibration.npz") as archive:
        pixels = torch.from_numpy(archive["image"][:images]).float() / 255
        data = TensorDataset(pixels, torch.from_numpy(archive["label"][:images]).long())
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        *(ConvolutionBlock(16) for _ in range(blocks)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    )
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    for x, y in DataLoader(Subset(data, range(images // 2)), batch_size=64, shuffle=True):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()

    unseen = DataLoader(Subset(data, range(images // 2, images)), batch_size=256)
    bundle = offramp.compile(
        model, unseen, output=output, max_disagreement=max_disagreement, overwrite=True
    )
    with offramp.load(bundle.path) as served:
        result = served.predict(input=pixels[-8:])
        print("classes", result.outputs["output"].argmax(1), "by exits", result.exits)
    return bundle


if __name__ == "__main__":
    main()
