"""``eebench compare --also``: which models are measured along, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.engines import engine_bundle
from tests.exports import exported
from tests.facts import Told, facts
from tests.models import Builder, mlp
from tests.sliced import dataset_of, inputs_of, sliced

from offramp.bundle import Bundle
from offramp.tools.bench.cli import main
from offramp.tools.bench.common.compare import AdditionalModel, AdditionalRunner, parse_also


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    monkeypatch.chdir(tmp_path)
    dataset = dataset_of(sliced("mlp"), 32)
    np.savez("test.npz", **dataset.inputs)
    return engine_bundle("mlp", Path("mlp.ee"))


def linear(
    *, classes: int = 3, batch: int | str = "rows", name: str = "logits", width: int = 16
) -> onnx.ModelProto:
    """A smaller model of the same inputs."""
    b = Builder(seed=1)
    b.linear(b.input("x", [batch, width]), width, classes, out=name)
    b.output(name, [batch, classes])
    return b.build()


def run(*also: str) -> int:
    how = ["--batch-sizes", "1,4", "--rounds", "2", "--json", "out.json"]
    arguments = [word for text in also for word in ("--also", text)]
    return main(["compare", "mlp.ee", "--data", "test.npz", *how, *arguments])


def test_an_export_and_a_smaller_model_are_measured_in_the_same_rounds(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    exported(bundle, Path(), inputs_of(sliced("mlp"), 20))
    onnx.save(linear(name="other"), "small.onnx")
    assert run("exported=f.onnx", "small=small.onnx") == 0
    document = json.loads(Path("out.json").read_text())
    rows = {(row["system"], row["batch_size"]): row for row in document["rows"]}
    systems = ("source", "offramp", "offramp-no-exit", "exported", "small")
    assert set(rows) == {(system, size) for system in systems for size in (1, 4)}
    for size in (1, 4):
        assert rows["exported", size]["agreement"] == rows["offramp", size]["agreement"]
        assert rows["small", size]["agreement"] < 1
    also = document["environment"]["also"]
    assert also["small"]["file"] == "small.onnx"
    assert len(also["exported"]["sha256"]) == 64
    said = capsys.readouterr().out
    assert "exported" in said
    assert "small" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("small.onnx", "expected NAME=FILE.onnx"),
        ("=small.onnx", "expected NAME=FILE.onnx"),
        ("a b=small.onnx", "expected NAME=FILE.onnx"),
        ("a=", "expected NAME=FILE.onnx"),
        ("source=small.onnx", "the name 'source' is taken"),
        ("offramp-no-exit=small.onnx", "the name 'offramp-no-exit' is taken"),
        ("a=missing.onnx", "missing.onnx is not a file"),
    ],
)
def test_malformed_values_are_refused_in_one_line(
    bundle: Bundle, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    onnx.save(linear(), "small.onnx")
    assert run(text) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_name_is_given_once(bundle: Bundle) -> None:
    onnx.save(linear(), "small.onnx")
    with pytest.raises(ValueError, match="the name 'a' is taken"):
        parse_also(["a=small.onnx", "a=small.onnx"])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: linear(width=17), ("x: float32 [rows, 17]", "[batch, 16]")),
        (lambda: linear(batch=1), ("x: float32 [1, 16]", "expected")),
        (lambda: linear(classes=4), ("'logits'", "['rows', 4]", "[batch, 3]")),
        (lambda: sliced("bert").model.proto, ("takes input_ids: int64",)),
    ],
)
def test_models_that_are_not_comparable_are_refused(bundle: Bundle, model, message: Told) -> None:
    onnx.save(model(), "other.onnx")
    with pytest.raises(ValueError, match=facts(*message)):
        AdditionalRunner(AdditionalModel(name="other", path=Path("other.onnx")), bundle, 1)


def test_of_several_outputs_it_is_that_of_the_answers_name(bundle: Bundle) -> None:
    model = mlp()
    model.graph.output.add().name = "hidden0"
    onnx.save(model, "two.onnx")
    runner = AdditionalRunner(AdditionalModel(name="two", path=Path("two.onnx")), bundle, 1)
    (departure,) = runner.run(inputs_of(sliced("mlp"), 6))
    assert departure.answer.shape == (6, 3)
    assert departure.rows.tolist() == list(range(6))
    model.graph.output[0].name = "hidden1"
    onnx.save(model, "two.onnx")
    with pytest.raises(ValueError, match="there are several"):
        AdditionalRunner(AdditionalModel(name="two", path=Path("two.onnx")), bundle, 1)


def test_what_is_no_model_is_refused(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.onnx").write_text("no model")
    assert run("a=text.onnx") == 1
    assert "ONNX Runtime cannot load it" in capsys.readouterr().err
