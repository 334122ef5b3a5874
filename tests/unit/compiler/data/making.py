"""Small data of every kind, and loading of them, for the tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from offramp.bundle import TensorSpec
from offramp.calibration.data.data_sources import DataSource
from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.data import PreprocessingSpec, find_source

VOCABULARY = ("[UNK]", "[PAD]", "[CLS]", "[SEP]", "good", "bad", "film", "very", "a")
IDS = TensorSpec(name="input_ids", dtype="int64", shape=("batch", "tokens"))
MASK = TensorSpec(name="attention_mask", dtype="int64", shape=("batch", "tokens"))
TYPES = TensorSpec(name="token_type_ids", dtype="int32", shape=("batch", "tokens"))
PHOTO = TensorSpec(name="image", dtype="float32", shape=("batch", 3, 4, 6))
X = TensorSpec(name="x", dtype="float32", shape=("batch", 3))


def load(
    source: DataSource | Path | str, *specs: TensorSpec, keys: Sequence[str] = (), **options: Any
) -> dict[str, NDArray[Any]]:
    """Load data, which a text or path names, with options of reading them."""
    return load_hashed(source, *specs, keys=keys, **options)[0]


def load_hashed(
    source: DataSource | Path | str, *specs: TensorSpec, keys: Sequence[str] = (), **options: Any
) -> tuple[dict[str, NDArray[Any]], str]:
    if isinstance(source, str | Path):
        source = find_source(str(source), PreprocessingSpec(**options))
    return source.load(specs, ScratchSpace(), keys=keys)


def save_tokenizer(path: Path, *, pad: bool = True, special: bool = True) -> Path:
    """Save a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = [word for word in VOCABULARY if pad or word != "[PAD]"]
    known = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", known["[CLS]"]), ("[SEP]", known["[SEP]"])],
        )
    tokenizer.save(str(path))
    return path


def save_image(path: Path, pixels: NDArray[Any]) -> Path:
    """Save an image of uint8 [height, width] or [height, width, 3]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def pixels(height: int = 4, width: int = 6, *, seed: int = 0) -> NDArray[np.uint8]:
    """Return the pixels of a colour image at random."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


def write_lines(path: Path, *lines: str | Mapping[str, Any]) -> Path:
    """Write lines of text, objects as JSON."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path
