"""Reproduce the elastic example: a residual CNN on Fashion-MNIST that holds 1,728 subnets.

At each of three resolutions, two of three blocks may be skipped, and the inner channels of the
blocks may be a quarter, a half or three quarters of the full number. All combinations share the
weights of the largest subnet. It is trained by the sandwich rule. Writes into ``--output`` (default
``examples/elastic``):

* ``elastic_resnet.onnx``, the largest subnet: input ``image`` uint8 [batch, 1, 28, 28], output
  ``logits`` float32 [batch, 10]; the normalisation is part of the graph.
* ``spec.toml``, for ``eecompile supernet``: blocks that may be skipped, widths that are elastic.
* ``training.json``: training settings, and the accuracy of subnets, with their own batch-norm
  statistics (SubnetNorm) and with those of the largest subnet.

It trains on the official training images that are neither in ``calibration.npz`` nor in
``test.npz`` of ``examples/fashion``, which calibrate and test it; they need Debian's
``dataset-fashion-mnist`` (MIT, Zalando SE), unpacked anywhere (``--images``), and the extra
``compile``. It is not needed to use Offramp; on two idle cores it takes about half an hour::

    python -m offramp.tools.zoo.elastic_resnet --output examples/elastic

On a busy machine set ``GOMP_SPINCOUNT=0``: otherwise torch's threads waste time in spin locks.
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

from offramp.supernet.training import (
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
"""Channels of the blocks at each resolution, inside and outside: 14 × 14, 7 × 7, 4 × 4."""
BLOCKS = 3
"""Number of blocks at each resolution."""
RATIOS = (0.25, 0.5, 0.75)
NORM_IMAGES = 2_000
"""Number of calibration images from which batch-norm statistics are computed."""


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
        """Return logits [batch, 10] of uint8 images [batch, 1, 28, 28]."""
        x = (image.float() - 72.94) / 90.02  # mean and deviation of the training pixels
        logits: Tensor = self.classifier(self.blocks(self.stem(x)).mean(dim=(2, 3)))
        return logits


def elastic_space() -> ElasticSpace:
    """Return the subnets: each resolution keeps its first block, and has its own inner width."""
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
    """Return the elastic ResNet, not trained yet."""
    torch.manual_seed(seed)
    network = ElasticFashionResNet()
    return ElasticModule(network, elastic_space(), (torch.zeros(2, 1, 28, 28, dtype=torch.uint8),))


class Training:
    """Training of the supernet by the sandwich rule: Nesterov SGD, one cycle, float32.

    The state is saved after every epoch, so that an interrupted run resumes.
    """

    def __init__(self, supernet: ElasticModule, images: int, options: argparse.Namespace) -> None:
        steps = -(-images // options.batch_size) * options.epochs
        self.supernet, self.options = supernet, options
        self.optimiser = torch.optim.SGD(
            supernet.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True
        )
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimiser, 0.1, steps, pct_start=0.2
        )
        self.generator = torch.Generator().manual_seed(options.seed)
        self.epochs_done, self.cpu_seconds = 0, 0.0
        if options.state is not None and options.state.exists():
            self._resume(torch.load(options.state))

    def run(self, samples: Samples) -> None:
        """Train in place, continuing where the last run ended."""
        (images,), labels = samples.tensors(), torch.from_numpy(samples.labels).long()
        self.supernet.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.supernet.train()
        while self.epochs_done < self.options.epochs:
            self._epoch(images, labels)
            self._keep()
        self.supernet.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]

    def _epoch(self, images: Tensor, labels: Tensor) -> None:
        begun, of_largest, of_smallest = time.process_time(), 0.0, 0.0
        order = torch.randperm(len(images), generator=self.generator)
        for index in torch.split(order, self.options.batch_size):
            batch = augment(images[index], self.generator)
            losses = sandwich_step(
                self.supernet,
                (batch.to(memory_format=torch.channels_last),),
                labels[index],
                self.optimiser,
                self.generator,
            )
            self.schedule.step()
            of_largest += losses.largest * len(index) / len(images)
            of_smallest += losses.smallest * len(index) / len(images)
        self.epochs_done += 1
        seconds = time.process_time() - begun
        self.cpu_seconds += seconds
        print(
            f"epoch {self.epochs_done}/{self.options.epochs}  loss {of_largest:.4f}, "
            f"smallest {of_smallest:.4f}  {seconds:.0f} s of CPU",
            flush=True,
        )

    def _keep(self) -> None:
        if self.options.state is None:
            return
        state = {
            "weights": self.supernet.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "schedule": self.schedule.state_dict(),
            "generator": self.generator.get_state(),
            "epochs": self.epochs_done,
            "cpu_seconds": self.cpu_seconds,
        }
        unfinished = self.options.state.with_suffix(".part")
        torch.save(state, unfinished)
        unfinished.replace(self.options.state)

    def _resume(self, state: dict[str, Any]) -> None:
        self.supernet.load_state_dict(state["weights"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.schedule.load_state_dict(state["schedule"])
        self.generator.set_state(state["generator"])
        self.epochs_done, self.cpu_seconds = state["epochs"], state["cpu_seconds"]


def multiplications(subnet: nn.Module, supernet: ElasticModule) -> int:
    """Return a subnet's multiplications for one image, in convolutions and linear layers."""
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
    """Return nine subnets with equal resolutions: three depths, three widths."""
    return [
        ElasticChoice(skipped=(skipped,) * len(space.depth), ratios=(ratio,) * len(space.width))
        for skipped in (0, 1, 2)
        for ratio in (1.0, 0.5, 0.25)
    ]


def measure(supernet: ElasticModule, calibration: Samples, test: Samples) -> list[dict[str, Any]]:
    """Test subnets with their own statistics, and with the recorded ones of the largest subnet."""
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


def main() -> None:
    """Train, record norms, test, and export."""
    parser = argparse.ArgumentParser(description="Train the elastic example.")
    parser.add_argument("--output", type=Path, default=Path("examples/elastic"))
    parser.add_argument("--images", type=Path, default=DATASET, help="folder of Fashion-MNIST")
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument(
        "--threads", type=int, default=2, help="CPU threads of torch during training"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--state", type=Path, help="file with the training state; an existing one is resumed"
    )
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    parts = read_images(options)
    supernet = make_supernet(options.seed)
    training = Training(supernet, len(parts.train), options)
    training.run(parts.train)
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
        "training_cpu_seconds": round(training.cpu_seconds),
        "measured": subnets,
    }
    (options.output / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
