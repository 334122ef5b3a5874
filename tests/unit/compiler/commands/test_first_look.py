"""``eecompile MODEL.onnx`` without data: a screen that helps, and exit status 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from tests import models

from offramp.calibration.data.dataset import DataError, Dataset, split
from offramp.certify import samples_needed
from offramp.certify.binomial import least_to_split
from offramp.compiler.commands.cli import main


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    onnx.save(models.mlp(), "model.onnx")
    yield


def look(capfd: pytest.CaptureFixture[str], *options: str) -> list[str]:
    """The lines of the screen."""
    assert main(["model.onnx", *options]) == 2
    out, err = capfd.readouterr()
    assert err == ""
    assert [path.name for path in Path().iterdir()] == ["model.onnx"], "nothing is written"
    return [line.rstrip() for line in out.splitlines()]


def test_the_screen_says_what_the_model_is_and_the_ways_on(capfd) -> None:
    screen = look(capfd)
    assert (
        screen
        == """\
model   model
task    classification (--task names another)
inputs  x: float32 [batch, 16]
answer  logits: 3 classes, logits
exits   3 places; tried: 3, after 31, 63, 94 % of the work

A promise that at most 1 % of its answers change, with 95 % confidence, takes
703 samples at least; 10,000 are better. Labels are not needed.
They should be like the samples that will be served.

Three ways on:
  eecompile model.onnx --data DATA
      you have samples:
      npz or folder of npy · folder of images · CSV or JSONL of texts
      parquet · Hugging Face data set · module:function
  eeserve model.onnx --learn
      you have none: serve the unmodified model, record its
      inputs, compile in the background, and switch over
  eecompile model.onnx --data random
      a dry run on random inputs, to see exits and times;
      it certifies nothing

eecompile --help shows the options.""".splitlines()
    )


def test_it_counts_for_the_promise_that_is_asked_for(capfd) -> None:
    screen = " ".join(look(capfd, "--max-disagreement", "0.001", "--confidence", "0.99"))
    least = least_to_split(samples_needed(0.001, 0.99))
    assert f"at most 0.1 % of its answers change, with 99 % confidence, takes {least:,}" in screen
    assert f"{2 * least:,} are better" in screen


def test_the_least_number_of_samples_is_that_of_the_split() -> None:
    import numpy as np

    def data(samples: int) -> Dataset:
        return Dataset(inputs={"x": np.zeros((samples, 1))}, labels=None, sha256="")

    least = least_to_split(299)
    assert len(split(data(least), certify_at_least=299, seed=0).certify) == 299
    with pytest.raises(DataError, match=f"give at least {least} "):
        split(data(least - 1), certify_at_least=299, seed=0)


def test_it_shows_the_places_of_the_exits_that_are_asked_for(capfd) -> None:
    assert "exits   3 places; tried: 1, after 63 % of the work" in look(capfd, "--exits", "1")


def test_it_names_some_of_many_inputs(capfd) -> None:
    b = models.Builder()
    names = [f"x{number}" for number in range(9)]
    inputs = [b.input(name, ["batch", 4]) for name in names]
    hidden = b.node("Relu", b.node("Concat", *inputs, axis=1), out="hidden")
    b.linear(b.node("Relu", b.linear(hidden, 36, 36)), 36, 3, out="logits")
    b.output("logits", ["batch", 3])
    onnx.save(b.build(), "model.onnx")
    screen = look(capfd)
    assert "        x5: float32 [batch, 4]" in screen
    assert "        and 3 more" in screen
    assert not any("x6" in line for line in screen)


def test_data_without_its_flag_are_told_how_to_be_given(capfd) -> None:
    with pytest.raises(SystemExit):
        main(["model.onnx", "few.npz"])
    told = "eecompile: error: few.npz is one argument too many; did you mean --data few.npz?\n"
    assert capfd.readouterr().err.startswith(told)


@pytest.mark.parametrize("content", [b"", b"<html>"])
def test_a_model_that_cannot_be_read_is_the_readers_error(capfd, content: bytes) -> None:
    Path("model.onnx").write_bytes(content)
    assert main(["model.onnx"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("eecompile: model.onnx: not an ONNX file")
    assert err.count("\n") == 1


def test_a_model_without_a_place_for_exits_says_why(capfd) -> None:
    b = models.Builder()
    b.linear(b.input("x", ["batch", 16]), 16, 3, out="logits")
    b.output("logits", ["batch", 3])
    onnx.save(b.build(), "model.onnx")
    assert main(["model.onnx"]) == 1
    assert "the model has no cut point" in capfd.readouterr().err
