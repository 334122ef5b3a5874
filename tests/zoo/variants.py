"""Variants of models: a family, exported in some way, with a batch of some kind."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from tests.zoo import ready
from tests.zoo.conversions import CONVERSIONS, OPSETS, Arrays
from tests.zoo.families import FAMILIES

Exporter = Literal["dynamo", "torchscript", "file"]
Batch = Literal[1, 2, "dynamic"]

ROWS = 64
_MOST_OPSET = {"torchscript": 20, "dynamo": 25}
"""The newest that torch's exporters write; newer ones are converted to."""


@dataclass(frozen=True)
class Variant:
    """A family as one file."""

    family: str
    exporter: Exporter
    batch: Batch
    length: bool = False
    """True if the length is dynamic too."""
    changed: str = ""
    """Change of the file; see :mod:`tests.zoo.conversions`, and ``bf16``."""

    def __str__(self) -> str:
        return f"{self.family}, {self.how}, {self.size}"

    @property
    def how(self) -> str:
        """Exporter, and what was done then."""
        return f"{self.exporter}, {self.changed}" if self.changed else self.exporter

    @property
    def size(self) -> str:
        """Fixed and dynamic sizes."""
        return f"{self.batch}, length too" if self.length else str(self.batch)

    def missing(self) -> str | None:
        """The package that this machine lacks for it."""
        family = FAMILIES.get(self.family)
        needed = [
            family.package if family else None,
            "onnxscript" if self.exporter == "dynamo" else None,
        ]
        lacking = [name for name in needed if name and importlib.util.find_spec(name) is None]
        return lacking[0] if lacking else None


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file, and inputs for it."""

    path: Path
    batch: int | None
    """Rows that the file takes; ``None`` where it takes any."""
    inputs: tuple[Arrays, ...]
    """Samples; where the length is dynamic, samples of another length too."""


def variants() -> list[Variant]:
    """All of them, a family's together."""
    every = [*_exports(), *_changed()]
    order = [*FAMILIES, *ready.FILES]
    return sorted(every, key=lambda variant: order.index(variant.family))


def _exports() -> Iterator[Variant]:
    for name, family in FAMILIES.items():
        # the larger ones, and torch's newer exporter, take a while
        small = family.package is None
        fixed = {"torchscript": (1, 2) if small else (1,), "dynamo": (2,) if small else ()}
        for exporter, sizes in fixed.items():
            for batch in (*sizes, "dynamic"):
                yield Variant(name, exporter, batch)
            if family.dynamic:
                yield Variant(name, exporter, "dynamic", length=True)
    for name, file in ready.FILES.items():
        yield Variant(name, "file", "dynamic" if file.batch is None else 1)


def _changed() -> Iterator[Variant]:
    for name in ("ResNet", "BERT", "LSTM"):
        for version in OPSETS:
            exporter = "torchscript" if version < 18 else "dynamo"
            yield Variant(name, exporter, "dynamic", changed=f"opset {version}")
        for done in ("QDQ int8", "QOperator int8", "dynamic int8", "fp16", "fp16 inside", "bf16"):
            yield Variant(name, "torchscript", "dynamic", changed=done)
        yield Variant(name, "torchscript", 1, changed="QDQ int8")
        yield Variant(name, "dynamo", "dynamic", changed="external data")
    for name in ("MobileNetV2", "ConvNeXt", "ViT", "GPT-2", "GRU"):
        for done in ("QDQ int8", "QOperator int8", "fp16"):
            yield Variant(name, "torchscript", "dynamic", changed=done)


def export(variant: Variant, folder: Path) -> Exported:
    """Write the ONNX file as a user would who reads its tool's documentation."""
    path = folder / "model.onnx"
    torch.manual_seed(0)
    if variant.exporter == "file":
        file = ready.FILES[variant.family]
        proto = file.make()
        path.write_bytes(proto.SerializeToString())
        return Exported(path=path, batch=file.batch, inputs=(file.inputs(proto),))
    family = FAMILIES[variant.family]
    model = family.make().eval()
    if variant.changed == "bf16":
        model = _Bfloat(model)
    lengths = family.lengths if variant.length else family.lengths[:1]
    _write(variant, model, path)
    inputs = tuple(_arrays(family.inputs(ROWS, length)) for length in lengths)
    if variant.changed in CONVERSIONS and not _written(variant):
        with _silence():
            CONVERSIONS[variant.changed](path, inputs[0])
    fixed = variant.batch if isinstance(variant.batch, int) else None
    return Exported(path=path, batch=fixed, inputs=inputs)


def _arrays(given: dict[str, Tensor]) -> Arrays:
    return {name: tensor.numpy() for name, tensor in given.items()}


class _Bfloat(nn.Module):
    """A model that computes in bfloat16, which numpy has not: inputs and answer are float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.bfloat16()

    def forward(self, *given: Tensor) -> Tensor:
        rounded = [x.bfloat16() if x.is_floating_point() else x for x in given]
        return self.model(*rounded).float()


def _opset(variant: Variant) -> int | None:
    return int(variant.changed.removeprefix("opset ")) if "opset" in variant.changed else None


def _written(variant: Variant) -> bool:
    """Return True if the exporter itself writes the requested opset."""
    opset = _opset(variant)
    return opset is not None and opset <= _MOST_OPSET[variant.exporter]


def _write(variant: Variant, model: nn.Module, path: Path) -> None:
    family = FAMILIES[variant.family]
    given = family.inputs(variant.batch if isinstance(variant.batch, int) else 2, family.lengths[0])
    sizes = {name: {0: "batch"} for name in given}
    if variant.length:
        for name, axis in family.dynamic.items():
            sizes[name][axis] = "length"
    settings: dict[str, object] = {"dynamo": variant.exporter == "dynamo"}
    if _written(variant):
        settings["opset_version"] = _opset(variant)
    if variant.exporter == "dynamo":
        settings["external_data"] = False
    if variant.batch == "dynamic" and variant.exporter == "dynamo":
        free = torch.export.Dim.DYNAMIC
        settings["dynamic_shapes"] = tuple(dict.fromkeys(axes, free) for axes in sizes.values())
    elif variant.batch == "dynamic":
        settings["dynamic_axes"] = {**sizes, "answer": {0: "batch"}}
    with _silence():
        torch.onnx.export(
            model,
            tuple(given.values()),
            path,
            input_names=list(given),
            output_names=["answer"],
            **settings,
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
