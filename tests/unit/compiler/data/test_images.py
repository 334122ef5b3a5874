"""A folder of images becomes the input of a model as its preprocessing says."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.facts import Told, facts, tells
from tests.unit.compiler.data.making import (
    IDS,
    PHOTO,
    X,
    load,
    load_hashed,
    pixels,
    save_image,
    write_lines,
)

from offramp.bundle import TensorSpec
from offramp.bundle.npz import is_mapped
from offramp.calibration.data import data_sources
from offramp.calibration.data.errors import DataError
from offramp.compiler.data import images

RAW = TensorSpec(name="image", dtype="uint8", shape=("batch", 4, 6, 3))
GRAY = TensorSpec(name="image", dtype="uint8", shape=("batch", 4, 6))
FREE = TensorSpec(name="image", dtype="float32", shape=("batch", 3, "height", "width"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of three images of the model's size, one of them in a folder inside."""
    folder = tmp_path / "photos"
    for number, name in enumerate(["b.png", "a.PNG", "a/z.bmp"]):
        save_image(folder / name, pixels(seed=number))
    write_lines(folder / "readme.txt", "no image")
    (folder / "._b.png").write_bytes(b"left by another system")
    return folder


def three() -> np.ndarray:
    """Return the pixels of the folder's images in the order of their paths."""
    return np.stack([pixels(seed=seed) for seed in (1, 2, 0)])


def test_models_of_bytes_get_the_pixels(folder: Path) -> None:
    np.testing.assert_array_equal(load(folder, RAW)["image"], three())


def test_pixels_become_0_to_1_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    array = load(folder, PHOTO)["image"]
    assert array.dtype == np.float32
    wanted = three().transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(array, wanted)
    tells(caplog.text, "0 to 1", "--mean, --std or --scale")


def test_normalisation_is_that_of_torchvision(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    array = load(folder, PHOTO, mean=mean, std=std)["image"]
    wanted = ((three() / 255 - mean) / std).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(array, wanted, rtol=0, atol=1e-6)  # float32
    scaled = load(folder, PHOTO, mean=(127.5,), std=(2.0,), scale=1.0)["image"]
    np.testing.assert_array_equal(scaled, ((three() - 127.5) / 2).transpose(0, 3, 1, 2))
    assert not caplog.records


def test_half_precision(folder: Path) -> None:
    spec = TensorSpec(name="image", dtype="float16", shape=PHOTO.shape)
    array = load(folder, spec, scale=1.0)["image"]
    assert array.dtype == np.float16
    np.testing.assert_array_equal(array, three().transpose(0, 3, 1, 2))


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "CMYK"])
def test_modes_become_what_the_model_takes(tmp_path: Path, mode: str) -> None:
    suffix = ".jpg" if mode == "CMYK" else ".png"
    image = Image.fromarray(pixels()).convert(mode)
    image.save(tmp_path / f"a{suffix}", quality=100)
    with Image.open(tmp_path / f"a{suffix}") as saved:
        colours, gray = (np.asarray(saved.convert(wanted)) for wanted in ("RGB", "L"))
    np.testing.assert_array_equal(load(tmp_path, RAW)["image"][0], colours)
    np.testing.assert_array_equal(load(tmp_path, GRAY)["image"][0], gray)


def test_a_palette_with_transparency(tmp_path: Path) -> None:
    image = Image.fromarray(pixels()).convert("P")
    image.save(tmp_path / "a.png", transparency=bytes([0, 128, 255]))
    assert load(tmp_path, RAW)["image"].shape == (1, 4, 6, 3)  # Pillow would warn


def test_images_of_another_size_are_cropped_or_stretched(tmp_path: Path) -> None:
    wide = np.zeros((4, 12, 3), np.uint8)
    wide[:, 3:9] = 200
    save_image(tmp_path / "a.png", wide)
    assert (load(tmp_path, RAW)["image"] == 200).all()
    stretched = load(tmp_path, RAW, resize="stretch", resample="nearest")["image"][0]
    assert stretched[0, :, 0].tolist() == [0, 200, 200, 200, 0, 0]
    half = load(tmp_path, RAW, crop_share=0.5, resample="nearest")["image"]
    assert (half == 200).all()


def test_a_share_of_an_image_of_the_right_size_is_cropped(tmp_path: Path) -> None:
    framed = np.zeros((4, 6, 3), np.uint8)
    framed[1:3, 1:5] = 200
    save_image(tmp_path / "a.png", framed)
    assert (load(tmp_path, RAW, crop_share=0.5, resample="nearest")["image"] == 200).all()
    assert (load(tmp_path, RAW)["image"][0] == framed).all()


def test_the_crop_is_that_of_torchvision(tmp_path: Path) -> None:
    """Torchvision's default: the shorter side to 256, then the middle 224 × 224."""
    smooth = np.linspace(0, 255, 300 * 400 * 3).reshape(300, 400, 3).astype(np.uint8)
    save_image(tmp_path / "a.png", smooth)
    spec = TensorSpec(name="image", dtype="uint8", shape=("batch", 224, 224, 3))
    ours = load(tmp_path, spec, crop_share=0.875)["image"][0]
    with Image.open(tmp_path / "a.png") as image:
        resized = image.resize((341, 256), Image.Resampling.BILINEAR)
        theirs = np.asarray(resized.crop((58, 16, 58 + 224, 16 + 224)))
    assert np.abs(ours.astype(int) - theirs).max() <= 2  # resized once, not twice


def test_a_model_of_any_size_needs_one(folder: Path) -> None:
    array = load(folder, FREE, image_size=(2, 3), scale=1.0)["image"]
    assert array.shape == (3, 3, 2, 3)


def test_options_beside_the_images(folder: Path) -> None:
    write_lines(
        folder / "preprocessing.toml", "mean = [0.5, 0.4, 0.3]", "std = 0.5", 'resample = "nearest"'
    )
    array = load(folder, PHOTO)["image"]
    wanted = ((three() / 255 - (0.5, 0.4, 0.3)) / 0.5).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(array, wanted, rtol=0, atol=1e-6)
    over = load(folder, PHOTO, mean=(0.0,))["image"]  # the command line wins
    np.testing.assert_allclose(over, (three() / 127.5).transpose(0, 3, 1, 2), rtol=0, atol=1e-6)


def test_the_hash_is_of_the_pixels_as_the_model_gets_them(folder: Path, tmp_path: Path) -> None:
    digest = load_hashed(folder, PHOTO, scale=1.0)[1]
    assert digest == load_hashed(folder, PHOTO, scale=1.0)[1]
    assert digest != load_hashed(folder, PHOTO, scale=0.5)[1]
    (folder / "b.png").rename(folder / "c.png")  # the order is the same
    assert digest == load_hashed(folder, PHOTO, scale=1.0)[1]
    (folder / "c.png").rename(folder / "0.png")
    assert digest != load_hashed(folder, PHOTO, scale=1.0)[1]


def test_the_first_images_alone(folder: Path) -> None:
    np.testing.assert_array_equal(load(folder, RAW, max_samples=2)["image"], three()[:2])


def test_many_images_stay_on_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_sources, "HELD_BYTES", 100)
    monkeypatch.setattr(images, "_BATCH", 2)
    array = load(folder, RAW)["image"]
    assert is_mapped(array)
    np.testing.assert_array_equal(array, three())


@pytest.mark.parametrize("content", [b"", b"text", "cut", "bomb"])
def test_a_broken_image_is_named(
    folder: Path, content: bytes | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = folder / "a" / "broken.png"
    save_image(broken, pixels(64, 64))
    if content == "bomb":
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    else:
        whole = broken.read_bytes()
        broken.write_bytes(whole[:-2000] if content == "cut" else content)
    with pytest.raises(DataError, match=facts("broken.png", "image", "mend")):
        load(folder, RAW)


def test_deep_pixels_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 6), 40000, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(DataError, match=facts("deep.png", "I;16", "8 bits")):
        load(tmp_path, GRAY)


def shaped(*sizes: int | str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name="image", dtype=dtype, shape=("batch", *sizes))


@pytest.mark.parametrize(
    ("specs", "options", "message"),
    [
        ([PHOTO, X], {}, ("one input", "2: image")),
        ([shaped(5, 4, 6)], {}, ("1 or 3 channels", "[batch, 5, 4, 6]")),
        ([IDS], {}, ("1 or 3 channels", "input_ids")),
        ([shaped(3, 4, 3)], {}, ("nchw and nhwc", "--layout")),
        ([PHOTO], {"layout": "nhwc"}, ("--layout nhwc", "expected nchw")),
        ([FREE], {}, ("any size", "--image-size H,W")),
        ([PHOTO], {"image_size": (4, 7)}, ("--image-size 4,7", "image: float32")),
        ([RAW], {"mean": (0.5,)}, ("raw bytes", "--mean", "floats")),
        ([RAW], {"scale": 1.0}, ("raw bytes", "--scale")),
        ([shaped(3, 4, 6, dtype="int64")], {}, ("floats or uint8", "module:func")),
        ([shaped(1, 4, 6)], {"std": (1.0,) * 3}, ("--std has 3 numbers", "1 channels")),
        ([PHOTO], {"mean": (123.7,)}, ("--mean or --std is above 1", "255")),
        ([PHOTO], {"std": (58.0,)}, ("--mean or --std is above 1",)),
        ([PHOTO], {"tokenizer": Path("t")}, ("--tokenizer", "texts", "not used", "leave it out")),
        ([PHOTO], {"label_column": "y"}, ("--label-column", "tables", "not used")),
    ],
)
def test_models_and_options_that_do_not_fit(
    folder: Path, specs: list[TensorSpec], options: dict[str, Any], message: Told
) -> None:
    with pytest.raises(DataError, match=facts(f"{folder}:", *message)):
        load(folder, *specs, **options)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_the_layout_of_an_ambiguous_shape_is_asked_for(tmp_path: Path, layout: str) -> None:
    save_image(tmp_path / "a.png", pixels(3, 3))
    array = load(tmp_path, shaped(3, 3, 3), layout=layout, scale=1.0)["image"][0]
    wanted = pixels(3, 3)
    np.testing.assert_array_equal(array, wanted if layout == "nhwc" else wanted.transpose(2, 0, 1))


def test_without_pillow_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"PIL .*pip install 'offramp\[images\]'"):
        load(folder, RAW)


def test_loading_is_silent_where_all_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    load(folder, RAW)
    assert not caplog.records
