"""Reproduce the shipped example: a 56-layer residual CNN on Fashion-MNIST.

Writes into ``--output`` (default ``examples/fashion``):

* ``fashion_resnet56.onnx`` (the number is that of its layers): input ``image`` uint8
  [batch, 1, 28, 28], output ``logits`` float32 [batch, 10]; the normalisation is part of the graph.
* ``calibration.npz``: ``image`` and ``label`` of images that did not train the CNN.
* ``test.npz``: 4,000 images of the official test set that are in neither of the others.
* ``training.json``: training settings and accuracy.

Needs Debian's ``dataset-fashion-mnist`` (MIT, Zalando SE) and the extra ``compile``.
It is not needed to use Offramp; on two cores it takes about twenty minutes::

    python -m offramp.tools.zoo.fashion_resnet --output examples/fashion

``--widths`` and ``--depth`` train another network on the same data. This command trains a ResNet-18
of half the usual width, which has three times the weights of the example in a third of its layers::

    python -m offramp.tools.zoo.fashion_resnet --widths 32 64 128 256 --depth 2 --epochs 6 …
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from offramp.tools.zoo.autocast import bfloat16_pays

DATASET = Path("/usr/share/datasets/fashion-mnist")
TEST_IMAGES = 4_000
"""Number of images of the official test set for measuring; the other 6,000 calibrate."""


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut (He et al. 2016, the CIFAR variant)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, outputs, height / stride, width / stride]."""
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class FashionResNet(nn.Module):
    """ResNet of ``2·depth·len(widths) + 2`` layers, from uint8 images to logits.

    Each resolution has ``depth`` blocks of its width in ``widths``.
    """

    def __init__(self, depth: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = 2 * depth * len(widths) + 2
        self.stem = nn.Sequential(
            nn.Conv2d(1, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
        blocks: list[nn.Module] = []
        inputs = widths[0]
        for index, outputs in enumerate(widths):
            for position in range(depth):
                stride = 2 if index > 0 and position == 0 else 1
                blocks.append(ResidualBlock(inputs, outputs, stride))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(inputs, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits [batch, 10] of uint8 images [batch, 1, 28, 28]."""
        x = (image.float() - 72.94) / 90.02  # mean and deviation of the training pixels
        features = self.blocks(self.stem(x))
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits


def read_idx(name: str, folder: Path = DATASET) -> NDArray[np.uint8]:
    """Read one idx file of the dataset: images [n, 1, 28, 28] or labels [n], uint8."""
    raw = gzip.decompress((folder / f"{name}.gz").read_bytes())
    dimensions = raw[3]
    shape = np.frombuffer(raw, ">i4", dimensions, offset=4)
    data = np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions)
    return data.reshape(shape[0], 1, *shape[1:]) if dimensions == 3 else data


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each batch by up to two pixels and mirror half of the images."""
    dy, dx = torch.randint(0, 5, (2,), generator=generator).tolist()
    shifted = functional.pad(images, (2, 2, 2, 2))[:, :, dy : dy + 28, dx : dx + 28]
    mirror = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    return torch.where(mirror, shifted.flip(3), shifted)


def _batches(samples: int, size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return all samples' indices in random order, in tensors of ``size``."""
    return torch.split(torch.randperm(samples, generator=generator), size)


def train(
    model: nn.Module, images: Tensor, labels: Tensor, *, epochs: int, batch_size: int, seed: int
) -> None:
    """Train in place: SGD with Nesterov momentum, one cycle, bfloat16 where that pays."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    steps = -(-len(images) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.25, epochs * steps, pct_start=0.2)
    bfloat16 = bfloat16_pays()
    model.train()
    for epoch in range(epochs):
        started, total = time.monotonic(), 0.0
        for index in _batches(len(images), batch_size, generator):
            batch = augment(images[index], generator).to(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                loss = functional.cross_entropy(model(batch), labels[index])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
            total += loss.item() * len(index)
        seconds = time.monotonic() - started
        loss_text = f"loss {total / len(images):.4f}"
        print(f"epoch {epoch + 1}/{epochs}  {loss_text}  {seconds:.0f} s", flush=True)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that are classified as labelled, in float32."""
    model.eval()
    hits = 0
    for start in range(0, len(images), 500):
        rows = slice(start, start + 500)
        hits += int((model(images[rows]).argmax(1) == labels[rows]).sum())
    return hits / len(images)


def export(model: nn.Module, path: Path) -> None:
    """Write the model with a symbolic batch dimension, opset 17."""
    model.eval().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    torch.onnx.export(
        model,
        (torch.zeros(2, 1, 28, 28, dtype=torch.uint8),),
        str(path),
        input_names=["image"],
        output_names=["logits"],
        dynamic_axes={"image": {0: "batch"}, "logits": {0: "batch"}},
        opset_version=17,
        dynamo=False,
    )


def main() -> None:
    """Train, test, export, and write the splits."""
    parser = argparse.ArgumentParser(description="Train the Fashion-MNIST example.")
    parser.add_argument("--output", type=Path, default=Path("examples/fashion"))
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--depth", type=int, default=9, help="blocks per resolution (9: 56 layers)")
    parser.add_argument(
        "--widths", type=int, nargs="+", default=(16, 32, 64), help="channels at each resolution"
    )
    parser.add_argument("--training-images", type=int, default=46_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    images, labels = read_idx("train-images-idx3-ubyte"), read_idx("train-labels-idx1-ubyte")
    test_images = read_idx("t10k-images-idx3-ubyte")
    test_labels = read_idx("t10k-labels-idx1-ubyte")
    order = np.random.default_rng(options.seed)
    train_index = order.permutation(len(images))
    test_index = order.permutation(len(test_images))
    held_out = train_index[options.training_images :]
    trained = train_index[: options.training_images]

    model = FashionResNet(options.depth, options.widths)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    started = time.monotonic()
    train(
        model,
        torch.from_numpy(images[trained]),
        torch.from_numpy(labels[trained].astype(np.int64)),
        epochs=options.epochs,
        batch_size=options.batch_size,
        seed=options.seed,
    )
    reached = accuracy(
        model, torch.from_numpy(test_images.copy()), torch.from_numpy(test_labels.astype(np.int64))
    )
    print(f"test accuracy {reached:.4f} on {len(test_images)} images")

    options.output.mkdir(parents=True, exist_ok=True)
    export(model, options.output / f"fashion_resnet{model.layers}.onnx")
    tested, spare = test_index[:TEST_IMAGES], test_index[TEST_IMAGES:]
    mixed = order.permutation(len(held_out) + len(spare))
    np.savez_compressed(
        options.output / "calibration.npz",
        image=np.concatenate([images[held_out], test_images[spare]])[mixed],
        label=np.concatenate([labels[held_out], test_labels[spare]])[mixed],
    )
    np.savez_compressed(
        options.output / "test.npz", image=test_images[tested], label=test_labels[tested]
    )
    facts = {
        "layers": model.layers,
        "epochs": options.epochs,
        "training_images": options.training_images,
        "calibration_images": len(mixed),
        "test_images": TEST_IMAGES,
        "test_accuracy_10k": reached,
        "seed": options.seed,
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - started),
    }
    (options.output / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
