"""Images as inputs: decoded, resized and normalised, from a folder of files or encoded bytes."""

from __future__ import annotations

import io
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import TensorSpec
from offramp.bundle.optional_imports import optional_import
from offramp.calibration.data.data_sources import ArraysAndHash
from offramp.calibration.data.errors import DataError
from offramp.calibration.data.sample_writer import SampleWriter
from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.data.reading_options import Layout, PreprocessingSpec, Resample

if TYPE_CHECKING:
    from PIL.Image import Image


_log = logging.getLogger(__name__)

SUFFIXES: Final = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
"""Suffixes of image files that are read, in lower case."""
INSTALL: Final = "pip install 'offramp[images]'"
_MODES: Final = {1: "L", 3: "RGB"}
"""Pillow's image modes, by the model's number of channels."""
_EIGHT_BIT: Final = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX"}) | {
    "CMYK", "YCbCr", "LAB", "HSV"
}  # fmt: skip
"""Pillow's names of images with at most eight bits for each channel."""
_BATCH: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageForm:
    """The model input that takes images, and the conversion of an image to a sample of it."""

    spec: TensorSpec
    layout: Layout
    channels: int
    height: int
    width: int
    options: PreprocessingSpec

    def decode(self, file: Path | bytes, where: str) -> NDArray[Any]:
        """Return an image as a sample, without the batch dimension; DataError if it is broken."""
        from PIL import Image  # noqa: PLC0415 - an optional package

        try:
            with Image.open(file if isinstance(file, Path) else io.BytesIO(file)) as image:
                deep = image.mode not in _EIGHT_BIT
                pixels = None if deep else np.asarray(self._resized(self._converted(image)))
                mode = image.mode
        except Exception as error:  # Pillow raises many kinds for damage
            reason = " ".join(f"{error}".split()) or type(error).__name__
            raise DataError(
                f"{where} cannot be read as an image ({reason:.150}); mend or remove it"
            ) from error
        if pixels is None:
            raise DataError(
                f"{where} has pixels of mode {mode}, expected 8 bits for each channel; convert it"
            )
        return self._normalised(pixels)

    def _converted(self, image: Image) -> Image:
        if "transparency" in image.info:  # a palette with transparency, or a colour for it
            image = image.convert("RGBA")
        return image.convert(_MODES[self.channels])

    def _resized(self, image: Image) -> Image:
        from PIL.Image import Resampling  # noqa: PLC0415 - an optional package

        options, wanted = self.options, (self.width, self.height)
        if image.size == wanted and options.crop_share is None:
            return image
        filter_: Resample = options.resample or "bilinear"
        resampling = Resampling[filter_.upper()]
        if options.resize == "stretch":
            return image.resize(wanted, resampling)
        # The largest centred box of the wanted proportions, or a share of it.
        scale = (options.crop_share or 1.0) * min(
            image.width / self.width, image.height / self.height
        )
        width, height = scale * self.width, scale * self.height
        left, top = (image.width - width) / 2, (image.height - height) / 2
        box = (left, top, left + width, top + height)
        return image.resize(wanted, resampling, box=box)

    def _normalised(self, pixels: NDArray[Any]) -> NDArray[Any]:
        if pixels.ndim == 2:
            pixels = pixels[..., None]
        if self.spec.dtype != "uint8":
            values = pixels.astype(np.float32)
            scale = self.options.scale
            values = values / np.float32(255) if scale is None else values * np.float32(scale)
            if self.options.mean is not None:
                values -= np.array(self.options.mean, np.float32)
            if self.options.std is not None:
                values /= np.array(self.options.std, np.float32)
            pixels = values.astype(self.spec.dtype)
        if len(self.spec.shape) == 3:
            return pixels[..., 0]
        return pixels if self.layout == "nhwc" else pixels.transpose(2, 0, 1)


def image_form(specs: Sequence[TensorSpec], options: PreprocessingSpec, name: str) -> ImageForm:
    """Return the conversion of images to the input of a model.

    DataError if the model has no single input that takes images, or the options do not fit it.
    """
    _check_pillow()
    if len(specs) != 1:
        raise DataError(
            f"{name}: images are for models with one input, and this one has {len(specs)}: "
            f"{'; '.join(spec.describe() for spec in specs)}; pass arrays for all of them, or a "
            "module:function that yields batches"
        )
    (spec,) = specs
    layout = _layout(spec, options, name)
    shape = (*spec.shape, 1) if len(spec.shape) == 3 else spec.shape
    order = (1, 2, 3) if layout == "nchw" else (3, 1, 2)
    channels, height, width = (shape[axis] for axis in order)
    found: list[int] = []
    for size, asked in zip((height, width), options.image_size or (None, None), strict=True):
        if isinstance(size, int):
            if asked not in (None, size):
                raise DataError(
                    f"{name}: --image-size {_size_text(options)}: the model takes "
                    f"{spec.describe()}; leave it out, or set what the model takes"
                )
            found.append(size)
        elif asked is None:
            raise DataError(
                f"{name}: the model takes images of any size ({spec.describe()}); set one with "
                "--image-size H,W"
            )
        else:
            found.append(asked)
    assert isinstance(channels, int)
    _check_values(spec, channels, options, name)
    return ImageForm(
        spec=spec,
        layout=layout,
        channels=channels,
        height=found[0],
        width=found[1],
        options=options,
    )


def _size_text(options: PreprocessingSpec) -> str:
    """Return the size that was asked for, in the syntax of its flag."""
    return ",".join(map(str, options.image_size or ()))


def _check_pillow() -> None:
    """Raise a DataError with the remedy if Pillow is missing."""
    with optional_import("PIL", install=INSTALL, raises=DataError):
        import PIL.Image  # noqa: F401, PLC0415


def _layout(spec: TensorSpec, options: PreprocessingSpec, name: str) -> Layout:
    if len(spec.shape) == 3:  # gray images without a dimension of channels
        return "nhwc"
    fits = {
        "nchw": len(spec.shape) == 4 and spec.shape[1] in _MODES,
        "nhwc": len(spec.shape) == 4 and spec.shape[3] in _MODES,
    }
    layouts: list[Layout] = [layout for layout in ("nchw", "nhwc") if fits[layout]]
    if not layouts:
        raise DataError(
            f"{name}: images have 1 or 3 channels, and the model takes {spec.describe()}, which is "
            "neither [n, channels, height, width] nor [n, height, width, channels]; use a "
            "module:function that yields batches"
        )
    if options.layout is not None and options.layout not in layouts:
        raise DataError(
            f"{name}: --layout {options.layout} does not fit {spec.describe()}; expected "
            f"{layouts[0]}"
        )
    if options.layout is None and len(layouts) > 1:
        raise DataError(
            f"{name}: the model takes {spec.describe()}, which may be nchw and nhwc; choose one "
            "with --layout"
        )
    return options.layout or layouts[0]


def _check_values(spec: TensorSpec, channels: int, options: PreprocessingSpec, name: str) -> None:
    given = {
        "--mean": options.mean,
        "--std": options.std,
        "--scale": None if options.scale is None else (options.scale,),
    }
    named = {flag: values for flag, values in given.items() if values is not None}
    if spec.dtype == "uint8":
        if named:
            raise DataError(
                f"{name}: the model takes raw bytes ({spec.describe()}), and {next(iter(named))} "
                "is for models that take floats; leave it out"
            )
        return
    if np.dtype(spec.dtype).kind != "f":
        raise DataError(
            f"{name}: the model takes {spec.describe()}, and images become floats or uint8; use a "
            "module:function that yields batches"
        )
    for flag, values in named.items():
        if len(values) not in (1, channels):
            raise DataError(
                f"{name}: {flag} has {len(values)} numbers, and images have {channels} channels; "
                f"use {channels}, or one"
            )
    if options.scale is None and max((*(options.mean or (0,)), *(options.std or (0,)))) > 1:
        raise DataError(
            f"{name}: --mean or --std is above 1, and pixels are scaled to 0 to 1 first; divide "
            "them by 255, or add --scale 1 if they are for pixels of 0 to 255"
        )
    if not named:
        _log.warning(
            "%s: pixels go to the model as 0 to 1, since no --mean, --std or --scale is set; "
            "set the values of the model's training, or --scale 1/255 if there are no others.",
            name,
        )


@dataclass(frozen=True, slots=True)
class ImageFolderSource:
    """All images in a folder and in folders inside it, in the order of their paths."""

    path: Path
    options: PreprocessingSpec

    @property
    def name(self) -> str:
        """Path as it was passed in."""
        return str(self.path)

    def load(
        self, specs: Sequence[TensorSpec], scratch: ScratchSpace, *, keys: Collection[str] = ()
    ) -> ArraysAndHash:
        """Decode all images; a broken image is an error that names its file."""
        form = image_form(specs, self.options, self.name)
        with SampleWriter(self.name, scratch, keys=keys) as writer:
            files = files_in(self.path, SUFFIXES)[: self.options.max_samples]
            for start in range(0, len(files), _BATCH):
                part = files[start : start + _BATCH]
                batch = np.stack([form.decode(file, str(file)) for file in part])
                writer.append({form.spec.name: batch}, str(part[0]))
            return writer.finish()


def files_in(folder: Path, suffixes: Collection[str]) -> list[Path]:
    """Return the files with some suffixes in a folder and in folders inside it.

    ``suffixes`` are in lower case. Files are in the order of their paths; files whose name begins
    with a dot are left out.
    """
    return sorted(
        (
            file
            for file in folder.rglob("*")
            if file.suffix.lower() in suffixes and not file.name.startswith(".") and file.is_file()
        ),
        key=lambda file: file.as_posix(),
    )
