"""Joint training of backbone and exits; an interrupted run resumes with the same result."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper
from tests.facts import tells
from tests.models import Builder

from offramp.bundle import Answer
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.torch.joint_training import (
    JointlyTrained,
    JointModel,
    JointOptions,
    JointState,
    train_jointly,
)

ANSWER = Answer(output="logits", classes=3, form="logits")
OPTIONS = JointOptions(epochs=4, learning_rate=0.01, seed=3)
BACKBONE = "w0"


def joined() -> JointModel:
    """Return a model of two layers, with an exit after the first."""
    b = Builder(seed=1)
    x = b.input("x", ["batch", 16])
    hidden = b.node("Relu", b.linear(x, 16, 16), out="hidden")
    b.linear(hidden, 16, 3, out="exit/logits")
    b.linear(b.node("Relu", b.linear(hidden, 16, 16)), 16, 3, out="logits")
    b.output("exit/logits", ["batch", 3])
    b.output("logits", ["batch", 3])
    return JointModel(proto=b.build(), scores=("exit/logits", "logits"))


def samples(count: int, seed: int, labels: NDArray[np.int64] | None = None) -> Dataset:
    x = np.random.default_rng(seed).standard_normal((count, 16)).astype(np.float32)
    return Dataset(inputs={"x": x}, labels=labels, sha256="")


def trained(
    options: JointOptions = OPTIONS,
    *,
    state: JointState | None = None,
    progress: Callable[[int], None] = lambda _: None,
    labels: bool = False,
) -> JointlyTrained:
    whole = [samples(320, 0), samples(96, 1)]
    if labels:
        first = [(s.inputs["x"][:, 0] > 0).astype(np.int64) for s in whole]
        whole = [samples(len(right), seed, right) for seed, right in enumerate(first)]
    train, tune = whole
    model = joined()
    return train_jointly(
        model,
        model.proto.SerializeToString(),
        ANSWER,
        train=train,
        tune=tune,
        options=options,
        state=state,
        progress=progress,
    )


def weights(proto: onnx.ModelProto) -> dict[str, NDArray[Any]]:
    return {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}


def test_all_weights_learn_and_the_exit_comes_to_answer_like_the_model() -> None:
    found = trained()
    before, after = weights(joined().proto), weights(found.proto)
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before)
    first, kept = found.training.epochs[0], found.training.epochs[found.training.kept]
    assert found.training.kept > 0
    assert kept.losses[0] < first.losses[0]
    assert kept.agreement[0] > first.agreement[0] + 0.1
    assert first.agreement[1] == 1.0, "before training the copy is the model"


def test_of_equal_loss_nothing_is_kept_that_was_trained() -> None:
    found = trained(dataclasses.replace(OPTIONS, learning_rate=0.0))
    assert found.training.kept == 0
    before, after = weights(joined().proto), weights(found.proto)
    for name, weight in before.items():
        np.testing.assert_array_equal(after[name], weight)


def test_training_ends_where_epochs_bring_nothing() -> None:
    found = trained(dataclasses.replace(OPTIONS, learning_rate=0.0, epochs=9, patience=3))
    assert len(found.training.epochs) == 1 + 3


def test_progress_counts_every_sample_whether_training_ends_early_or_not() -> None:
    for options in (OPTIONS, dataclasses.replace(OPTIONS, learning_rate=0.0, epochs=9)):
        seen: list[int] = []
        trained(options, progress=seen.append)
        assert sum(seen) == options.epochs * 320


def test_training_that_leaves_finite_numbers_ends_with_what_was_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = trained(dataclasses.replace(OPTIONS, learning_rate=1e38))
    tells(caplog.text, "diverged", "learning rate of 1e+38")
    assert found.training.kept == 0
    assert found.proto == trained(dataclasses.replace(OPTIONS, learning_rate=0.0)).proto


@pytest.mark.parametrize("threads", [1, 3])
def test_the_same_run_gives_the_same_weights_on_any_number_of_cores(threads: int) -> None:
    assert trained(dataclasses.replace(OPTIONS, threads=threads)).proto == trained().proto


def test_answers_that_are_too_large_to_hold_are_computed_in_every_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = trained()
    monkeypatch.setattr("offramp.calibration.torch.joint_training._HELD_BYTES", 100)
    found = trained()
    assert len(found.training.epochs) == len(held.training.epochs)
    for name, weight in weights(held.proto).items():
        np.testing.assert_allclose(weights(found.proto)[name], weight, atol=1e-4)


@pytest.mark.parametrize("after", [1, 325, 700])
def test_a_run_that_was_cut_off_goes_on_as_if_it_had_not_been(tmp_path: Path, after: int) -> None:
    state = JointState(path=tmp_path / "weights.pt", digest="same")
    seen = 0

    def cut_off(samples: int) -> None:
        nonlocal seen
        seen += samples
        if seen > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(state=state, progress=cut_off)
    assert state.path.exists() == (after >= 320)
    seen = -(10**9)
    found, whole = trained(state=state, progress=cut_off), trained()
    assert found.proto == whole.proto
    assert found.training == whole.training


def test_what_is_of_another_training_or_broken_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = JointState(path=tmp_path / "weights.pt", digest="one")
    assert state.read() is None
    whole = trained(state=state)
    other = dataclasses.replace(state, digest="other")
    assert other.read() is None
    tells(caplog.text, "another training", "from the beginning")
    state.path.write_bytes(state.path.read_bytes()[:1000])
    assert trained(state=state).proto == whole.proto
    assert "cannot be read" in caplog.text


def test_a_state_file_runs_no_code(tmp_path: Path) -> None:
    import pickle

    path = tmp_path / "weights.pt"
    path.write_bytes(pickle.dumps({"digest": "one", "state": functools.partial(print, "ran")}))
    assert JointState(path=path, digest="one").read() is None


def test_labels_teach_what_the_model_does_not_answer() -> None:
    options = dataclasses.replace(OPTIONS, teacher="labels", epochs=8)
    found = trained(options, labels=True)
    data = samples(500, 9)
    session = ort.InferenceSession(found.proto.SerializeToString())
    answers = session.run(["logits"], {"x": data.inputs["x"]})[0].argmax(axis=1)
    assert (answers == (data.inputs["x"][:, 0] > 0)).mean() > 0.9
    assert found.training.teacher == "labels"


def test_labels_that_are_missing_are_asked_for() -> None:
    with pytest.raises(ValueError, match="add an array 'labels'"):
        trained(dataclasses.replace(OPTIONS, teacher="labels"))
