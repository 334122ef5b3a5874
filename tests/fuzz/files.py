"""Campaigns against readers of files: configuration, data sets, models."""

from __future__ import annotations

import io
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Final

import numpy as np

from offramp.bundle import TensorSpec
from offramp.calibration.data.dataset import DataError, read_dataset
from offramp.compiler.common.errors import CompileError
from offramp.compiler.frontend.model import read_model
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.server.arguments.configuration import read_configuration
from tests import models
from tests.fuzz.campaign import WrongError
from tests.fuzz.mutators import archive, havoc, protobuf

MOST_CHARS: Final = 4000
"""Longest message: it is read on a terminal."""


def one_line(error: Exception) -> str:
    """The outcome of a refusal: its text without what varies; WrongError if it is long."""
    text = str(error)
    if "\n" in text or not text:
        raise WrongError(f"a message of {text.count(chr(10)) + 1} lines") from error
    if len(text) > MOST_CHARS:
        raise WrongError(f"a message of more than {MOST_CHARS} characters") from error
    kind = "".join(letter for letter in text.partition("'")[0] if not letter.isdigit())
    return f"refused:{type(error).__name__} {kind[-60:]}"


class _OneFile:
    """Feeds a reader of one file."""

    suffix = ""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self.place = Path(self._folder.name) / f"case{self.suffix}"

    def put(self, case: bytes) -> Path:
        """Write the case where it is read."""
        self.place.write_bytes(case)
        return self.place

    def close(self) -> None:
        """Remove the file."""
        self._folder.cleanup()


class Config(_OneFile):
    """``eeserve --config``."""

    suffix = ".toml"

    def seeds(self) -> Sequence[bytes]:
        text = '[engine]\nmode = "audit"\nstreams = 2\n[defaults]\npolicy = "run-through"\n'
        text += 'max_batch_size = 8\n[models.a]\npath = "a.ee"\npolicy = "slackfit"\nslo_ms = 20\n'
        return [text.encode(), b"", b"[models]\n"]

    def mutate(self, case: bytes, random: Random) -> bytes:
        if random.random() < 0.5:
            return havoc(case, random)
        lines = case.split(b"\n")
        key = random.choice(_KEYS)
        place = random.randrange(len(lines) + 1)
        new = f"{key} = {random.choice(_VALUES)}".encode()
        if random.random() < 0.3:
            new = random.choice(_TABLES)
        lines[place : place + random.randrange(2)] = [new]
        return b"\n".join(lines)[:100_000]

    def check(self, case: bytes) -> str:
        place = self.put(case)
        try:
            read_configuration(place).options(engine={}, defaults={})
        except ValueError as error:
            return one_line(error)
        return "read"


_KEYS: Final = (
    "path",
    "policy",
    *(f.name for kind in (EngineOptions, ModelOptions) for f in fields(kind)),
)
_VALUES: Final = (
    *("0", "-1", "1", "2.5", "-0.0", "1e308", "1e400", "nan", "inf", "-inf", "true", "false"),
    *('""', '"x"', '"audit"', '"slackfit"', '"fixed:1"', '"fixed:-1"', '"fixed:' + "9" * 400 + '"'),
    *("9" * 400, "[]", "[[1], [2]]", "{}", "{ a = 1 }", "1979-05-27T07:32:00Z", "07:32:00"),
    *('"\\u0000"', "'''\nx\n'''", "0x" + "f" * 300, "[" * 300 + "]" * 300, '"' + "y" * 5000 + '"'),
    *("0.01", "64", "1000000000000000000", '"cuda:0"', '"onnxruntime"', '"certified"'),
)
_TABLES: Final = (
    *(b"[engine]", b"[defaults]", b"[models]", b"[models.b]", b'[models.""]', b"[[models]]"),
    *(b"[models.a.b.c]", b"[models.'..']", b"[x]", b"a.b.c.d = 1", b"[" + b"a." * 500 + b"a]"),
)


class Npz(_OneFile):
    """``eecompile --data``."""

    suffix = ".npz"
    _specs = (
        TensorSpec(name="x", dtype="float32", shape=("batch", 4)),
        TensorSpec(name="ids", dtype="int64", shape=("batch", "sequence")),
    )

    def seeds(self) -> Sequence[bytes]:
        rows = 6
        arrays = {
            "x": np.ones((rows, 4), np.float32),
            "ids": np.zeros((rows, 3), np.int64),
            "label": np.arange(rows),
        }
        return [_packed(np.savez, arrays), _packed(np.savez_compressed, arrays)]

    def mutate(self, case: bytes, random: Random) -> bytes:
        return archive(case, random)

    def check(self, case: bytes) -> str:
        try:
            data = read_dataset(self.put(case), self._specs)
        except DataError as error:
            return one_line(error)
        if any(data.inputs[spec.name].dtype != spec.dtype for spec in self._specs):
            raise WrongError("an array of another dtype was read")
        return "read"


def _packed(
    save: object, arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]
) -> bytes:
    content = io.BytesIO()
    save(content, **arrays)  # type: ignore[operator]
    return content.getvalue()


class Onnx(_OneFile):
    """The model of ``eecompile``."""

    suffix = ".onnx"

    def seeds(self) -> Sequence[bytes]:
        made = (models.mlp(layers=2, width=4), models.residual_cnn(blocks=2), models.conditional())
        return [bytes(model.SerializeToString()) for model in made]

    def mutate(self, case: bytes, random: Random) -> bytes:
        return protobuf(case, random)

    def check(self, case: bytes) -> str:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read_model(self.put(case))
        except CompileError as error:
            return one_line(error)
        return "read"
