"""The commands take images and texts as they are, from compiling to measuring."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests import models
from tests.bundles import brief_measurements, equal_times
from tests.facts import tells
from tests.unit.compiler.data.making import save_image, save_tokenizer, write_lines

from offramp.bundle import Bundle
from offramp.calibration.data.dataset import read_samples
from offramp.compiler.commands.cli import main
from offramp.compiler.data import PreprocessingSpec, find_source
from offramp.tools.bench.cli import main as bench

COMPILING = ("--epochs", "2", "--candidates", "2", "--max-overhead", "0.99")
PROMISE = ("--max-disagreement", "0.05")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with images of five kinds and a model compiled on them."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 256, (5, 16, 16, 3))
    for name, samples in (("train", 700), ("test", 100)):
        for number in range(samples):
            noisy = kinds[number % 5] + rng.normal(0, 8, (16, 16, 3))
            image = noisy.clip(0, 255).astype(np.uint8)
            save_image(folder / name / f"{number % 5}" / f"{number}.png", image)
        write_lines(folder / name / "preprocessing.toml", "mean = 0.5", "std = 0.25")
    onnx.save(models.residual_cnn(), folder / "model.onnx")
    with equal_times(), brief_measurements(), pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        assert main(["model.onnx", "--data", "train", *COMPILING, *PROMISE]) == 0
        yield folder


def test_a_model_is_compiled_on_a_folder_of_images(photos: Path) -> None:
    bundle = Bundle.open(photos / "model.ee")
    assert bundle.policy.active
    calibration = bundle.manifest.calibration
    splits = (calibration.train_samples, calibration.tune_samples, calibration.certify_samples)
    assert sum(splits) == 700
    data = read_samples(find_source(str(photos / "train"), PreprocessingSpec()), bundle.manifest)
    assert data.sha256 == calibration.data_sha256
    assert abs(float(data.inputs["image"].mean())) < 1  # as preprocessing.toml says


def test_other_commands_take_the_same_images(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "model.ee", "--data", "test", "--json", "check.json"]) == 0
    check = json.loads((photos / "check.json").read_text())
    assert check["samples"] == 100
    assert not check["on_calibration_data"]
    assert main(["verify", "model.ee", "--data", "train", "--json", "check.json"]) == 0
    assert json.loads((photos / "check.json").read_text())["on_calibration_data"]
    rehearse = ("rehearse", "model.ee", "--data", "train", "--dry-run")
    assert main([*rehearse]) == 1  # the exits were trained on them
    tells(capsys.readouterr().err, "train: model.ee was compiled with these samples", "other")
    export = ("export", "model.ee", "--data", "train", "--max-samples", "200")
    assert main([*export, "--output", "fast.onnx"]) == 0
    assert "Verified on 200 samples of train" in capsys.readouterr().out.replace("\n", " ")
    compare = ("compare", "model.ee", "--data", "test", "--batch-sizes", "4", "--rounds", "1")
    assert bench([*compare, "--json", "figures.json"]) == 0
    environment = json.loads((photos / "figures.json").read_text())["environment"]
    assert environment["data"] == "test"
    assert environment["data_is_calibration_data"] is False


def test_an_option_of_no_use_is_an_error_of_the_command(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "model.ee", "--data", "test", "--max-tokens", "3"]) == 1
    tells(capsys.readouterr().err, "eecompile: test", "--max-tokens", "texts", "leave it out")
    assert bench(["compare", "model.ee", "--data", "test", "--max-tokens", "3"]) == 1
    assert "eebench: test: --max-tokens is for texts" in capsys.readouterr().err


def test_a_model_is_compiled_on_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    words = ["good", "bad", "film", "very", "a"]
    people = [str(rng.integers(0, 600)) for _ in range(900)]
    texts = [" ".join(rng.choice(words, rng.integers(2, 6))) + f" {who}" for who in people]
    write_lines(
        tmp_path / "texts.jsonl",
        *(
            {"text": t, "label": i % 3, "who": who}
            for i, (t, who) in enumerate(zip(texts, people, strict=True))
        ),
    )
    save_tokenizer(tmp_path / "tokenizer.json")
    onnx.save(models.bert_like(token_types=True), tmp_path / "model.onnx")
    reading = ("--data", "texts.jsonl", "--tokenizer", "tokenizer.json", "--max-tokens", "10")
    with equal_times():
        asked = ("--max-disagreement", "0.2", "--group", "who", "--copies-within", "0")
        assert main(["model.onnx", *reading, *COMPILING, *asked]) == 0
        bundle = Bundle.open(tmp_path / "model.ee")
        distinct = bundle.manifest.calibration.distinct
        assert distinct is not None
        assert distinct.key == "who"
        assert distinct.rows == 900
        assert distinct.samples <= len(set(people))
        assert main(["verify", "model.ee", *reading, "--json", "check.json"]) == 0
    check = json.loads((tmp_path / "check.json").read_text())
    assert check["on_calibration_data"]  # the group is not part of the hash
    assert check["accuracy"] is not None


def test_readers_need_no_package_until_they_read() -> None:
    absent = ("PIL", "tokenizers", "pyarrow", "datasets", "torch")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
    code += "import offramp.compiler.data, offramp.compiler.commands.cli, offramp.tools.bench.cli"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
