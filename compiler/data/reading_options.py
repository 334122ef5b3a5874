"""Options of reading data: from the command line, a program, or a file ``preprocessing.toml``."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

from offramp.calibration.data.errors import DataError

Layout: TypeAlias = Literal["nchw", "nhwc"]
Resize: TypeAlias = Literal["crop", "stretch"]
Resample: TypeAlias = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Family: TypeAlias = Literal["images", "texts", "tables", "samples"]
"""Kind of data that an option is for; ``samples`` means all kinds."""

TOML_NAME: Final = "preprocessing.toml"
"""Name of the file with reading options in a folder of data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessingSpec:
    """Options of reading images, texts and tables; ``None`` means the default of the kind."""

    image_size: tuple[int, int] | None = None
    """Height and width that images are resized to; by default those of the model's input."""
    mean: tuple[float, ...] | None = None
    """Mean for each channel, or one for all, of pixels after ``scale``; 0 by default."""
    std: tuple[float, ...] | None = None
    """Standard deviation for each channel, or one for all, of pixels after ``scale``; 1 by
    default."""
    scale: float | None = None
    """Factor that pixels (0 to 255) are multiplied by before mean and std; 1/255 by default."""
    layout: Layout | None = None
    """Order of the input's dimensions; derived from its shape by default."""
    resize: Resize | None = None
    """Treatment of images that are not of the input's shape: ``crop`` the middle (default), or
    ``stretch``."""
    crop_share: float | None = None
    """Share of the shorter side that ``crop`` keeps; 1 by default, 0.875 in torchvision."""
    resample: Resample | None = None
    """Filter for resizing; bilinear by default."""
    image_column: str | None = None
    """Column of a table that holds images."""
    tokenizer: Path | None = None
    """File ``tokenizer.json`` of Hugging Face that converts texts to token ids."""
    text_column: tuple[str, ...] | None = None
    """Column of texts, or two columns for pairs of texts; ``text`` by default."""
    max_tokens: int | None = None
    """Number of tokens that texts are padded and cut to; by default the model's length, or 128."""
    label_column: str | None = None
    """Column of a table that holds classes; ``label`` or ``labels`` by default."""
    max_samples: int | None = None
    """Largest number of samples that are read, from the first on; all by default."""

    def filled_from(self, other: PreprocessingSpec) -> PreprocessingSpec:
        """Return these options; where one is ``None``, the value of ``other`` is used."""
        missing = {name: getattr(other, name) for name in _names() if getattr(self, name) is None}
        return replace(self, **missing)

    def check_used(
        self, families: Collection[Family], what: str, *, besides: Collection[str] = ()
    ) -> None:
        """Raise DataError for options that do not apply to the data; ``what`` names the data.

        Options named in ``besides`` are used for more than reading, and apply to all data.
        """
        for option in OPTIONS:
            used = option.family in {"samples", *families} or option.field in besides
            if getattr(self, option.field) is not None and not used:
                raise DataError(
                    f"{what}: {option.flag} is for {option.family}, and is not used here; leave "
                    "it out"
                )


def _names() -> list[str]:
    return [field.name for field in fields(PreprocessingSpec)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingOption:
    """A field of :class:`PreprocessingSpec`, as a flag and as a key of TOML files."""

    field: str
    family: Family
    metavar: str
    parse: Callable[[str], Any]
    """Function that parses a value; raises ``argparse.ArgumentTypeError`` for a wrong one."""
    help: str

    @property
    def flag(self) -> str:
        """Flag, such as ``--image-size``."""
        return "--" + self.field.replace("_", "-")


def read_toml(path: Path) -> PreprocessingSpec:
    """Read options from a file; DataError if one is unknown, or has a wrong value.

    Keys are the names of flags with underscores, such as ``image_size = [224, 224]``. A relative
    path in the file is relative to the file's folder.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not TOML: {error}; mend it there") from error
    known = {option.field: option for option in OPTIONS}
    found: dict[str, Any] = {}
    for key, value in content.items():
        if key not in known:
            raise DataError(f"{path}: there is no option {key!r}; expected {', '.join(known)}")
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        try:
            found[key] = known[key].parse(text)
        except argparse.ArgumentTypeError as error:
            raise DataError(f"{path}: {key}: {error}") from error
    if "tokenizer" in found:
        found["tokenizer"] = path.parent / found["tokenizer"]
    return PreprocessingSpec(**found)


def _size(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; use height and width, such as 224,224"
        )
    return int(parts[0]), int(parts[1])


def _numbers(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) not in (1, 3) or not all(abs(value) < float("inf") for value in values):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number for each channel; use one or three, such as "
            "0.485,0.456,0.406"
        )
    return values


def _deviations(text: str) -> tuple[float, ...]:
    values = _numbers(text)
    if min(values) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a standard deviation must be above 0")
    return values


def _factor(text: str) -> float:
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError, OverflowError):
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a factor of pixels; use a number above 0, such as 1 or 1/255"
        )
    return value


def _share(text: str) -> float:
    value = _factor(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; use a number up to 1")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if len(names) > 2 or not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not one column, or two for pairs of texts")
    return names


def _one_of(values: Any) -> Callable[[str], str]:
    words: tuple[str, ...] = get_args(values)

    def parse(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(words)}")
        return text

    return parse


def _option(field: str, family: Family, metavar: str, parse: Any, help_: str) -> ReadingOption:
    return ReadingOption(field=field, family=family, metavar=metavar, parse=parse, help=help_)


OPTIONS: Final[tuple[ReadingOption, ...]] = (
    _option("image_size", "images", "H,W", _size, "height and width (default: the model's)"),
    _option("mean", "images", "X,X,X", _numbers,
            "mean that is subtracted from each channel, after --scale (default: 0)"),
    _option("std", "images", "X,X,X", _deviations,
            "deviation that each channel is then divided by (default: 1)"),
    _option("scale", "images", "X", _factor, "factor of the pixels, 0 to 255 (default: 1/255)"),
    _option("layout", "images", "nchw|nhwc", _one_of(Layout),
            "order of the input's dimensions (default: by its shape)"),
    _option("resize", "images", "crop|stretch", _one_of(Resize),
            "how images of another shape fit: crop the middle, or stretch (default: crop)"),
    _option("crop_share", "images", "X", _share,
            "share of the shorter side that crop keeps; 0.875 in torchvision (default: 1)"),
    _option("resample", "images", "FILTER", _one_of(Resample),
            "nearest, bilinear, bicubic or lanczos (default: bilinear)"),
    _option("image_column", "images", "NAME", str, "column of a table that holds images"),
    _option("tokenizer", "texts", "FILE", Path, "tokenizer.json of Hugging Face"),
    _option("text_column", "texts", "NAME[,NAME]", _columns,
            "column of texts, or two of pairs (default: text)"),
    _option("max_tokens", "texts", "N", _count,
            "tokens that texts are padded and cut to (default: the model's length, or 128)"),
    _option("label_column", "tables", "NAME", str, "column of classes (default: label or labels)"),
    _option("max_samples", "samples", "N", _count, "read only the first N samples"),
)  # fmt: skip
"""All reading options, in the order of the help."""
