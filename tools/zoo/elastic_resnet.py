"""Reproduce the elastic example: a residual CNN on Fashion-MNIST that holds 1,728 subnets.

At each of three resolutions two of three blocks may be skipped, and the inside of the blocks may be
a quarter, a half or three quarters as wide: all combinations share the weights of the largest. It
is trained by the sandwich rule. Writes into ``--output`` (default ``examples/elastic``):

* ``elastic_resnet.onnx``, the largest subnet: input ``image`` uint8 [batch, 1, 28, 28], output
  ``logits`` float32 [batch, 10]; the normalisation is part of the graph.
* ``spec.toml``, for ``eecompile supernet``: blocks that may be skipped, widths that are elastic.
* ``training.json``: how it was trained, and what accuracy subnets reach with batch-norm statistics
  of their own (SubnetNorm) and with those of the largest.

It trains on the official training images that are neither in ``calibration.npz`` nor in
``test.npz`` of ``examples/fashion``, which calibrate and test it; they need Debian's
``dataset-fashion-mnist`` (MIT, Zalando SE), unpacked anywhere (``--images``), and the extra
``compile``. Nobody has to run it to use Offramp; on two idle cores it takes about half an hour::

    python -m offramp.tools.zoo.elastic_resnet --output examples/elastic

Beside busy neighbours set ``GOMP_SPINCOUNT=0``: else torch's threads wait for each other in vain.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offramp.calibration.elastic import (
    ElasticChoice,
    ElasticDepth,
    ElasticModule,
    ElasticSpace,
    ElasticWidth,
    calibrate_norms,
    export_supernet,
    extract,
    sandwich_step,
)
from offramp.tools.zoo.fashion_resnet import DATASET, ResidualBlock, augment
from offramp.tools.zoo.small_models import Samples, accuracy, read_images

CHANNELS = (32, 64, 192)
"""Of the blocks at each resolution, inside and outside: 14 × 14, 7 × 7, 4 × 4."""
BLOCKS = 3
"""At each resolution."""
RATIOS = (0.25, 0.5, 0.75)
NORM_IMAGES = 2_000
"""Calibration images that batch-norm statistics are computed of."""


class ElasticFashionResNet(nn.Module):
    """The largest subnet: three resolutions (14, 7, 4) of three blocks each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, CHANNELS[0], 3, 2, 1, bias=False), nn.BatchNorm2d(CHANNELS[0]), nn.ReLU()
        )
        blocks: list[nn.Module] = []
        inputs = CHANNELS[0]
        for stage, outputs in enumerate(CHANNELS):
            for position in range(BLOCKS):
                stride = 2 if stage and not position else 1
                blocks.append(ResidualBlock(inputs, outputs, stride))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(inputs, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Give logits [batch, 10] of uint8 images [batch, 1, 28, 28]."""
        x = (image.float() - 72.94) / 90.02  # mean and deviation of the training pixels
        logits: Tensor = self.classifier(self.blocks(self.stem(x)).mean(dim=(2, 3)))
        return logits


def elastic_space() -> ElasticSpace:
    """Each resolution keeps its first block, and is as wide as it chooses inside its blocks."""
    stages = [range(BLOCKS * stage, BLOCKS * (stage + 1)) for stage in range(len(CHANNELS))]
    return ElasticSpace(
        depth=tuple(
            ElasticDepth(skip=tuple(f"blocks.{index}" for index in reversed(stage[1:])))
            for stage in stages
        ),
        width=tuple(
            ElasticWidth(layers=tuple(f"blocks.{index}.conv1" for index in stage), ratios=RATIOS)
            for stage in stages
        ),
    )


def make_supernet(seed: int) -> ElasticModule:
    """The elastic ResNet, not trained yet."""
    torch.manual_seed(seed)
    network = ElasticFashionResNet()
    return ElasticModule(network, elastic_space(), (torch.zeros(2, 1, 28, 28, dtype=torch.uint8),))


def train(
    supernet: ElasticModule, samples: Samples, *, epochs: int, batch_size: int, seed: int
) -> None:
    """Train in place by the sandwich rule: SGD with Nesterov momentum, one cycle, float32."""
    generator = torch.Generator().manual_seed(seed)
    (images,), labels = samples.tensors(), torch.from_numpy(samples.labels).long()
    optimiser = torch.optim.SGD(
        supernet.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    steps = -(-len(samples) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.1, epochs * steps, pct_start=0.2)
    supernet.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    supernet.train()
    for epoch in range(epochs):
        begun, of_largest, of_smallest = time.monotonic(), 0.0, 0.0
        order = torch.randperm(len(samples), generator=generator)
        for index in torch.split(order, batch_size):
            batch = augment(images[index], generator).to(memory_format=torch.channels_last)
            losses = sandwich_step(supernet, (batch,), labels[index], optimiser, generator)
            schedule.step()
            of_largest += losses.largest * len(index) / len(samples)
            of_smallest += losses.smallest * len(index) / len(samples)
        print(
            f"epoch {epoch + 1}/{epochs}  loss {of_largest:.4f}, smallest {of_smallest:.4f}  "
            f"{time.monotonic() - begun:.0f} s",
            flush=True,
        )
    supernet.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def multiplications(subnet: nn.Module, supernet: ElasticModule) -> int:
    """Multiplications of a subnet for one image, in convolutions and linear layers."""
    counts = []

    def count(layer: nn.Module, _given: Any, answer: Tensor) -> None:
        weight = layer.get_parameter("weight")
        counts.append(answer[0].numel() * weight[0].numel())

    layers = [part for part in subnet.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    handles = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        subnet(*supernet.sample)
    for handle in handles:
        handle.remove()
    return sum(counts)


def uniform_choices(space: ElasticSpace) -> list[ElasticChoice]:
    """Give nine subnets whose resolutions are all alike: three depths, three widths."""
    return [
        ElasticChoice(skipped=(skipped,) * len(space.depth), ratios=(ratio,) * len(space.width))
        for skipped in (0, 1, 2)
        for ratio in (1.0, 0.5, 0.25)
    ]


def measure(supernet: ElasticModule, calibration: Samples, test: Samples) -> list[dict[str, Any]]:
    """Test subnets with statistics of their own, and with the largest's, which are recorded."""
    batches = [(images,) for images in torch.split(calibration[:NORM_IMAGES].tensors()[0], 500)]
    supernet.record_norms(calibrate_norms(supernet, supernet.space.largest(), batches))
    rows: list[dict[str, Any]] = []
    for choice in uniform_choices(supernet.space):
        shared = extract(supernet, choice)
        own = extract(supernet, choice, calibrate_norms(supernet, choice, batches))
        rows.append(
            {
                **asdict(choice),
                "parameters": sum(weights.numel() for weights in own.parameters()),
                "multiplications": multiplications(own, supernet),
                "test_accuracy": accuracy(own, test),
                "test_accuracy_without_norms_of_its_own": accuracy(shared, test),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def train_or_load(supernet: ElasticModule, samples: Samples, options: argparse.Namespace) -> float:
    """Train the supernet, or load what was trained before; gives the CPU seconds that it took."""
    if options.state is not None and options.state.exists():
        state = torch.load(options.state)
        supernet.load_state_dict(state["weights"])
        return float(state["cpu_seconds"])
    begun = time.process_time()
    sizes = {"epochs": options.epochs, "batch_size": options.batch_size}
    train(supernet, samples, **sizes, seed=options.seed)
    seconds = time.process_time() - begun
    if options.state is not None:
        torch.save({"weights": supernet.state_dict(), "cpu_seconds": seconds}, options.state)
    return seconds


def main() -> None:
    """Train, record norms, test, and export."""
    parser = argparse.ArgumentParser(description="Train the elastic example.")
    parser.add_argument("--output", type=Path, default=Path("examples/elastic"))
    parser.add_argument("--images", type=Path, default=DATASET, help="folder of Fashion-MNIST")
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2, help="of torch while it trains")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--state", type=Path, help="file for the trained weights; if it is there, they are read"
    )
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    parts = read_images(options)
    supernet = make_supernet(options.seed)
    seconds = train_or_load(supernet, parts.train, options)
    supernet.eval()
    subnets = measure(supernet, parts.calibration, parts.test)
    path = options.output / "elastic_resnet.onnx"
    export_supernet(supernet, path, inputs=["image"], outputs=["logits"])
    facts = {
        "parameters": sum(weights.numel() for weights in supernet.parameters()),
        "subnets": sum(1 for _ in supernet.space.choices()),
        "epochs": options.epochs,
        "batch_size": options.batch_size,
        "training_images": len(parts.train),
        "norm_images": NORM_IMAGES,
        "test_images": len(parts.test),
        "threads": options.threads,
        "seed": options.seed,
        "torch": torch.__version__,
        "training_cpu_seconds": round(seconds),
        "measured": subnets,
    }
    (options.output / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
