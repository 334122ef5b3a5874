"""Make an elastic sentiment classifier: MiniLM with elastic depth and MLP width (DynaBERT).

MiniLM is fine-tuned as in :mod:`offramp.tools.zoo.minilm_sentiment`. Then the hidden units of its
MLPs are sorted by importance, so that the most important units come first. Then training continues
by the sandwich rule: the largest subnet learns the labels, the other subnets learn the fine-tuned
model's answers (Hou et al. 2020, DynaBERT 2; only its distillation of logits). Writes into
``--output``:

* ``elastic_minilm.onnx``, the largest subnet: inputs ``input_ids`` and ``attention_mask`` int64
  [batch, sequence], output ``logits`` float32 [batch, 2].
* ``spec.toml``, for ``eecompile supernet``: three of six layers may be skipped, and MLPs may be a
  quarter, a half or three quarters as wide.
* ``calibration.npz`` and ``test.npz``: IMDB's reviews, as minilm_sentiment writes them.
* ``training.json``: training settings, and the accuracy of subnets.

Needs what minilm_sentiment needs, under the same licences. On two idle cores it should take about
an hour (not measured yet)::

    python -m offramp.tools.zoo.elastic_minilm --output demo/elastic_minilm
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from offramp.supernet.training import (
    ElasticChoice,
    ElasticDepth,
    ElasticModule,
    ElasticSpace,
    ElasticWidth,
    export_supernet,
    extract,
    sandwich_step,
)
from offramp.tools.zoo.minilm_sentiment import (
    Reviews,
    fine_tune,
    installed_versions,
    read_reviews,
    split,
)

SKIPPED = (4, 2, 0)
"""Layers that may be skipped, in the order of skipping."""
RATIOS = (0.25, 0.5, 0.75)
IMPORTANCE_REVIEWS = 320
"""Reviews used to compute the importance of hidden units from gradients."""


def elastic_space(layers: int) -> ElasticSpace:
    """Return the subnets: every other layer may be skipped, and all MLPs are equally wide."""
    expanding = tuple(f"encoder.layers.{index}.expand" for index in range(layers))
    return ElasticSpace(
        depth=(ElasticDepth(skip=tuple(f"encoder.layers.{index}" for index in SKIPPED)),),
        width=(ElasticWidth(layers=expanding, ratios=RATIOS),),
    )


def batches(
    reviews: Reviews, order: Iterable[Tensor]
) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
    """Yield ids and mask, cut to the longest review of a batch, and labels, by lists of indices."""
    ids, mask = torch.from_numpy(reviews.input_ids), torch.from_numpy(reviews.attention_mask)
    labels = torch.from_numpy(reviews.label.astype(np.int64))
    for index in order:
        longest = int(mask[index].sum(1).max())
        yield (ids[index, :longest], mask[index, :longest]), labels[index]


def sort_hidden_units(model: nn.Module, reviews: Reviews) -> None:
    """Sort the hidden units of each MLP in place, the most important first; answers stay equal.

    The importance of a unit is the change of the loss without it, to first order: |Σ w · ∂loss/∂w|
    over its incoming weights and bias, summed over batches (DynaBERT 2.1).
    """
    model.eval()
    pairs = [
        (model.get_submodule(name), model.get_submodule(f"{name.removesuffix('expand')}contract"))
        for name in elastic_space(_layers(model)).width[0].layers
    ]
    importance = [torch.zeros(len(expand.get_parameter("weight"))) for expand, _ in pairs]
    for inputs, labels in batches(reviews, torch.split(torch.arange(len(reviews)), 32)):
        model.zero_grad(set_to_none=True)
        functional.cross_entropy(model(*inputs), labels).backward()  # type: ignore[no-untyped-call]
        for sums, (expand, _) in zip(importance, pairs, strict=True):
            weight, bias = expand.get_parameter("weight"), expand.get_parameter("bias")
            assert weight.grad is not None
            assert bias.grad is not None
            sums.add_(((weight * weight.grad).sum(1) + bias * bias.grad).abs().detach())
    model.zero_grad(set_to_none=True)
    for sums, (expand, contract) in zip(importance, pairs, strict=True):
        order = sums.argsort(descending=True)
        for layer, name, axis in (
            (expand, "weight", 0),
            (expand, "bias", 0),
            (contract, "weight", 1),
        ):
            parameter = layer.get_parameter(name)
            parameter.data = parameter.data.index_select(axis, order)


def _layers(model: nn.Module) -> int:
    return len(list(model.get_submodule("encoder.layers").children()))


def train(
    supernet: ElasticModule, reviews: Reviews, options: argparse.Namespace, *, steps: int | None
) -> float:
    """Train in place by the sandwich rule: AdamW, and a rate that falls to zero.

    Subnets learn the answers that the model has before this training. Return the training time in
    seconds.
    """
    from offramp.tools.zoo.minilm import batches_of_like_length  # noqa: PLC0415 - as fine_tune

    teacher = copy.deepcopy(supernet).eval()
    generator = torch.Generator().manual_seed(options.seed)
    lengths = torch.from_numpy(reviews.attention_mask).sum(dim=1)
    order = [
        index
        for _ in range(options.elastic_epochs)
        for index in batches_of_like_length(lengths, options.batch_size, generator)
    ][:steps]
    optimiser = torch.optim.AdamW(supernet.parameters(), options.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, len(order))
    supernet.train()
    begun = time.monotonic()
    for step, (inputs, labels) in enumerate(batches(reviews, order), 1):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=options.bfloat16):
            targets = teacher(*inputs).float()
        losses = sandwich_step(
            supernet,
            inputs,
            labels,
            optimiser,
            generator,
            targets=targets,
            bfloat16=options.bfloat16,
            clip=1.0,
        )
        schedule.step()
        if step % 25 == 0 or step == len(order):
            spent = time.monotonic() - begun
            found = f"loss {losses.largest:.3f}, smallest {losses.smallest:.3f}"
            print(f"step {step}/{len(order)}  {found}  {spent:.0f} s", flush=True)
    return time.monotonic() - begun


@torch.no_grad()
def accuracy(model: nn.Module, reviews: Reviews) -> float:
    """Return the share of the reviews that are classified as labelled."""
    hits = [
        int((model(*inputs).argmax(1) == labels).sum())
        for inputs, labels in batches(reviews, torch.split(torch.arange(len(reviews)), 50))
    ]
    return sum(hits) / len(reviews)


def parse_arguments() -> argparse.Namespace:
    """Read the command line; ``fine_tune`` reads some of it."""
    parser = argparse.ArgumentParser(description="Make an elastic MiniLM of film reviews.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--epochs", type=int, default=1, help="epochs of fine-tuning")
    parser.add_argument(
        "--elastic-epochs", type=int, default=2, help="epochs of training by the sandwich rule"
    )
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--training", type=int, default=10_000, metavar="REVIEWS")
    parser.add_argument("--test", type=int, default=3_000, metavar="REVIEWS")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N reviews of each part")
    parser.add_argument("--steps", type=int, metavar="N", help="at most N sandwich steps")
    parser.add_argument(
        "--bfloat16",
        action=argparse.BooleanOptionalAction,
        help="train with bfloat16 autocast (default: if the CPU has AVX-512)",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Fine-tune, sort, train by the sandwich rule, test, export."""
    options = parse_arguments()
    versions = installed_versions()
    parts = split(
        read_reviews("imdb"),
        train=options.training,
        test=options.test,
        limit=options.limit,
        order=np.random.default_rng(options.seed),
    )
    model = fine_tune(parts.train, options)
    sort_hidden_units(model, parts.train[:IMPORTANCE_REVIEWS])
    ids = torch.arange(14).view(2, 7)
    supernet = ElasticModule(model, elastic_space(_layers(model)), (ids, torch.ones_like(ids)))
    seconds = train(supernet, parts.train, options, steps=options.steps)
    supernet.eval()

    options.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for skipped in range(len(SKIPPED) + 1):
        for ratio in (1.0, *reversed(RATIOS)):
            choice = ElasticChoice(skipped=(skipped,), ratios=(ratio,))
            found = accuracy(extract(supernet, choice), parts.test)
            rows.append({**asdict(choice), "test_accuracy": found})
            print(json.dumps(rows[-1]), flush=True)
    both = {0: "batch", 1: "sequence"}
    export_supernet(
        supernet,
        options.output / "elastic_minilm.onnx",
        inputs=["input_ids", "attention_mask"],
        outputs=["logits"],
        axes={"input_ids": both, "attention_mask": both},
        norm_layers="none",
    )
    parts.calibration.save(options.output / "calibration.npz")
    parts.test.save(options.output / "test.npz")
    facts = {key: value for key, value in vars(options).items() if key != "output"}
    facts |= {"training_seconds": round(seconds), "versions": versions, "measured": rows}
    (options.output / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
