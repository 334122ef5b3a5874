"""Variants of models: a family, exported by one of torch's exporters, with a batch of some kind."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from offramp.compiler.cuts import find_cuts
from offramp.compiler.errors import CompileError
from offramp.compiler.model import read_model
from offramp.compiler.placement import choose_candidates
from offramp.compiler.runtime import random_inputs
from offramp.compiler.slice_verification import verify
from offramp.compiler.slicing import split
from tests.zoo import images, pretrained, sequences

Exporter = Literal["dynamo", "torchscript"]
Batch = Literal[1, 2, "dynamic"]

BATCH_SIZES = (1, 7, 64)
TOKENS = 16


@dataclass(frozen=True)
class Family:
    """A topology: how it is made, and inputs of some rows for it."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    package: str | None = None


def ids(rows: int) -> tuple[Tensor, ...]:
    return (torch.randint(1, 50, (rows, TOKENS)),)


def masked_ids(rows: int) -> tuple[Tensor, ...]:
    return *ids(rows), torch.ones(rows, TOKENS, dtype=torch.int64)


def normal(*sizes: int, count: int = 1) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda rows: tuple(torch.randn(rows, *sizes) for _ in range(count))


def _families() -> Iterator[Family]:
    for name, make in images.IMAGES.items():
        yield Family(name, make, normal(3, 32, 32))
    for name, make in sequences.MASKED_TEXTS.items():
        yield Family(name, make, masked_ids)
    for name, make in sequences.TEXTS.items():
        yield Family(name, make, ids)
    for name, (make, sizes) in sequences.OTHERS.items():
        yield Family(name, make, normal(*sizes))
    for name, make in sequences.PAIRS.items():
        yield Family(name, make, normal(sequences.WIDTH, count=2))
    for name, (kind, settings) in pretrained.IMAGES.items():
        size = settings.get("image_size", 32)
        make = pretrained.image(kind, settings)
        yield Family(name, make, normal(3, size, size), "transformers")
    for name, (kind, settings) in pretrained.TEXTS.items():
        yield Family(name, pretrained.text(kind, settings), masked_ids, "transformers")


FAMILIES = {family.name: family for family in _families()}


@dataclass(frozen=True)
class Variant:
    """A family as one file."""

    family: str
    exporter: Exporter
    batch: Batch

    def __str__(self) -> str:
        return f"{self.family}, {self.exporter}, {self.batch}"

    def missing(self) -> str | None:
        """The package that this machine lacks for it."""
        needed = [
            FAMILIES[self.family].package,
            "onnxscript" if self.exporter == "dynamo" else None,
        ]
        lacking = [name for name in needed if name and importlib.util.find_spec(name) is None]
        return lacking[0] if lacking else None


def variants() -> list[Variant]:
    exporters: tuple[Exporter, ...] = ("torchscript", "dynamo")
    batches: tuple[Batch, ...] = (1, 2, "dynamic")
    return [Variant(name, e, batch) for name in FAMILIES for e in exporters for batch in batches]


def export(variant: Variant, path: Path) -> None:
    """Write the ONNX file as a user would who reads torch's documentation."""
    family = FAMILIES[variant.family]
    torch.manual_seed(0)
    model = family.make().eval()
    given = family.inputs(variant.batch if isinstance(variant.batch, int) else 2)
    names = [f"input{i}" for i in range(len(given))]
    settings: dict[str, object] = {"dynamo": variant.exporter == "dynamo"}
    if variant.exporter == "dynamo":
        settings["external_data"] = False
    if variant.batch == "dynamic" and variant.exporter == "dynamo":
        settings["dynamic_shapes"] = tuple({0: torch.export.Dim.DYNAMIC} for _ in given)
    elif variant.batch == "dynamic":
        settings["dynamic_axes"] = {name: {0: "batch"} for name in [*names, "answer"]}
    with _silence():
        torch.onnx.export(
            model, given, path, input_names=names, output_names=["answer"], **settings
        )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep exporters from telling their users what we know."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


@dataclass(frozen=True)
class Outcome:
    """What came of a variant."""

    variant: Variant
    cuts: int = 0
    first: float = 0.0
    """Share of the work before the first cut."""
    last: float = 0.0
    worst: float = 0.0
    """Largest difference between chained segments and model, relative, at batches of 1, 7, 64."""
    form: str = ""
    remark: str = ""
    """Why it is refused, or where no cut is."""

    @property
    def verified(self) -> bool:
        return not self.remark


def examine(variant: Variant, folder: Path) -> Outcome:
    """Export, read (which compares rows alone, together and with the original), cut and verify."""
    path = folder / "model.onnx"
    export(variant, path)
    try:
        model = read_model(path)
        analysis = find_cuts(model)
        points = choose_candidates(analysis, limit=12)
        segments = split(model, points)
        samples = random_inputs(model.proto, max(BATCH_SIZES))
        worst = verify(model, segments, samples, batch_sizes=BATCH_SIZES)
    except CompileError as error:
        return Outcome(variant, remark=str(error).removeprefix(f"{path}: "))
    shares = [cut.flops_share_before for cut in analysis.cuts]
    return Outcome(
        variant,
        cuts=len(shares),
        first=min(shares),
        last=max(shares),
        worst=worst,
        form=model.answer.form,
    )
