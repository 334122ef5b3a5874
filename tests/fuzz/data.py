"""A campaign against the readers of ``--data`` that are not numpy's: tables, images, options."""

from __future__ import annotations

import io
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Final

import numpy as np
import pyarrow
from PIL import Image
from pyarrow import parquet

from offramp.bundle import TensorSpec
from offramp.calibration.data.dataset import DataError, read_dataset
from offramp.compiler.data import PreprocessingSpec, find_source
from offramp.compiler.data.reading_options import read_toml
from tests.fuzz.campaign import WrongError
from tests.fuzz.files import one_line
from tests.fuzz.mutators import havoc

_X: Final = TensorSpec(name="x", dtype="float32", shape=("batch", 2))
_IMAGE: Final = TensorSpec(name="image", dtype="uint8", shape=("batch", 4, 6, 3))
_TOML: Final = b"""image_size = [4, 6]
mean = [0.5, 0.5, 0.5]
scale = "1/255"
layout = "nchw"
text_column = ["a", "b"]
tokenizer = "t.json"
max_samples = 3
"""


class DataFiles:
    """Feeds readers with a file; a case is its suffix, a line's end, and its content."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")

    def seeds(self) -> Sequence[bytes]:
        table, image = io.BytesIO(), io.BytesIO()
        columns = {"a": [1, 2, 3], "b": [0.5, 1, 2], "label": [0, 1, 1]}
        parquet.write_table(pyarrow.table(columns), table)
        Image.fromarray(np.arange(72, dtype=np.uint8).reshape(4, 6, 3)).save(image, "png")
        return [
            b".csv\na,b,label\n1,0.5,0\n2,1e3,1\n",
            b'.jsonl\n{"a": 1, "b": 0.5}\n{"a": 2, "b": 1e3, "label": 1}\n',
            b'.jsonl\n{"x": [1, 2], "label": [0, 1]}\n{"x": [3, 4], "label": [1, 1]}\n',
            b".parquet\n" + table.getvalue(),
            b".png\n" + image.getvalue(),
            b".toml\n" + _TOML,
        ]

    def mutate(self, case: bytes, random: Random) -> bytes:
        suffix, _, content = case.partition(b"\n")
        return suffix + b"\n" + havoc(content, random)

    def check(self, case: bytes) -> str:
        suffix, _, content = case.partition(b"\n")
        folder = Path(self._folder.name) / suffix.decode()[1:]
        folder.mkdir(exist_ok=True)
        place = folder / f"case{suffix.decode()}"
        place.write_bytes(content)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if suffix == b".toml":
                    read_toml(place)
                    return "read"
                spec = _IMAGE if suffix == b".png" else _X
                source = find_source(str(folder if spec is _IMAGE else place), PreprocessingSpec())
                data = read_dataset(source, [spec])
        except DataError as error:
            return one_line(error)
        if data.inputs[spec.name].dtype != spec.dtype:
            raise WrongError("an array of another dtype was read")
        return "read"

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()
