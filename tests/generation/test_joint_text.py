"""A decoder that is trained with its exits: what it computes, keeps, and gets better at."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray

from offramp.calibration.data.errors import UntrainableError
from offramp.compiler.common.tensors import array_of
from offramp.generation.graphs.text_graphs import TextExit, TextExport, cut_export, read_export
from offramp.generation.training.joint_text import (
    JointlyTrainedText,
    JointTextTraining,
    _Decoder,
    _Texts,
    train_joint_text,
)
from tests.text_loops import PlainModel, write_all
from tests.text_models import (
    LAYERS,
    START,
    backend_of,
    drawn_prompts,
    exported,
    propagated,
    write,
)

EXITS = (1, 3)
PROMPTS, MOST = 40, 8
OPTIONS = JointTextTraining(epochs=3, batch_size=8, learning_rate=2e-3, tuned=0.25)
UNTRAINED = JointTextTraining(epochs=0, tuned=0.25)
KINDS_OF_EXPORT = {
    "decoder": {},
    "decoder without mask": {"mask": False, "positions": False},
    "encoder-decoder": {"encodes": True},
    "post-norm": {"post_norm": True},
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def taught(**made: Any) -> tuple[TextExport, list[NDArray[np.int64]], list[NDArray[np.int64]]]:
    """An export, prompts, and its own answers to them."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(exported(**made), Path(folder))
        plain, prompts = PlainModel(path), drawn_prompts(PROMPTS)
        return read_export(path), prompts, [np.array(plain.greedy(p, MOST)) for p in prompts]


@functools.cache
def trained(name: str) -> JointlyTrainedText:
    export, prompts, answers = taught(**KINDS_OF_EXPORT[name])
    return train_joint_text(
        export, prompts, answers, exits=EXITS, start_token=START, options=OPTIONS
    )


@pytest.mark.parametrize("name", list(KINDS_OF_EXPORT))
def test_torch_says_what_the_export_says(name: str) -> None:
    """Whole answers in one pass, padded, are compared with single tokens in ONNX Runtime."""
    export, prompts, answers = taught(**KINDS_OF_EXPORT[name])
    told = train_joint_text(
        export, prompts, answers, exits=EXITS, start_token=START, options=UNTRAINED
    )
    assert told.before.agreement[-1] == 1.0
    assert told.after == told.before
    assert told.export.decoder.proto.SerializeToString(
        deterministic=True
    ) == export.decoder.proto.SerializeToString(deterministic=True)
    assert told.export.encoder is export.encoder


def test_tokens_that_leave_are_propagated_as_they_are_served() -> None:
    export, prompts, answers = taught()
    decoder, texts = _Decoder(export, EXITS), _Texts.of(export, prompts, answers, None)
    rng, ends = np.random.default_rng(1), (*EXITS, LAYERS)
    rows = range(6)
    batch = texts.batch(rows)
    drawn = [rng.choice(ends, len(answers[row])) for row in rows]
    left = torch.full_like(batch.wanted, LAYERS)
    for row, depths in zip(rows, drawn, strict=True):
        left[row, len(prompts[row]) - 1 :][: len(depths)] = torch.from_numpy(depths)
    said = torch.full_like(batch.wanted, -1)
    with torch.no_grad():
        for end, (states, _) in zip(ends, decoder(batch, left), strict=True):
            here = (batch.wanted >= 0) & (left >= end)
            said[here] = decoder.logits(states).argmax(1)
    for row, depths in zip(rows, drawn, strict=True):
        wanted = propagated(prompts[row], answers[row].tolist(), depths.tolist())
        assert said[row, len(prompts[row]) - 1 :][: len(depths)].tolist() == wanted


@pytest.mark.parametrize("name", ["decoder", "encoder-decoder"])
def test_early_exits_get_better(name: str) -> None:
    told = trained(name)
    assert told.after.losses[0] < 0.98 * told.before.losses[0]
    assert told.after.propagated[0] < told.before.propagated[0]
    assert len(told.after.agreement) == len(EXITS) + 1


def test_what_is_told_of_the_copy_is_what_it_does_in_onnx_runtime(tmp_path: Path) -> None:
    """The share of the original's tokens that the copy says after the same ones."""
    _, prompts, answers = taught()
    told = trained("decoder")
    path = tmp_path / "copy.onnx"
    onnx.save(told.export.decoder.proto, path)
    copy = PlainModel(path)
    order = np.random.default_rng(OPTIONS.seed).permutation(PROMPTS)[: PROMPTS // 4]
    said = np.concatenate([copy.at_prefixes(prompts[row], answers[row].tolist()) for row in order])
    wanted = np.concatenate([answers[row] for row in order])
    assert (said == wanted).mean() == pytest.approx(told.after.agreement[-1], abs=0.5 / len(said))


def test_weights_that_are_one_stay_one() -> None:
    """The LM head has those of the embedding, in the copy as in the original."""
    export, *_ = taught()
    proto = trained("decoder").export.decoder.proto
    names = [tensor.name for tensor in export.decoder.proto.graph.initializer]
    assert [tensor.name for tensor in proto.graph.initializer] == names
    assert list(proto.graph.node) == list(export.decoder.proto.graph.node)
    weights, before = (
        {tensor.name: array_of(tensor) for tensor in model.graph.initializer}
        for model in (proto, export.decoder.proto)
    )
    (table,) = (n.input[0] for n in proto.graph.node if n.op_type == "Transpose"
                and n.input[0] in weights)  # fmt: skip
    assert np.abs(weights[table] - before[table]).max() > 1e-4
    for name, values in weights.items():
        assert (values.dtype, values.shape) == (before[name].dtype, before[name].shape)
        if values.size == 1 or values.dtype != np.float32:
            np.testing.assert_array_equal(values, before[name], err_msg=name)


@pytest.mark.parametrize("name", ["decoder", "encoder-decoder"])
def test_the_copy_is_cut_and_served_as_any_export(name: str) -> None:
    prompts = drawn_prompts(4, seed=9)
    exits = [TextExit(layer=layer, threshold=0.5) for layer in EXITS]
    graphs = cut_export(trained(name).export, exits, start_token=START)
    written = write_all(backend_of(graphs), prompts, MOST)
    assert [len(written[number].tokens) for number in range(len(prompts))] == [MOST] * len(prompts)


def test_training_is_the_same_in_every_run() -> None:
    export, prompts, answers = taught()
    again = train_joint_text(export, prompts, answers, exits=EXITS, options=OPTIONS)
    assert again.after == trained("decoder").after


def test_progress_rises_to_the_end() -> None:
    export, prompts, answers = taught()
    told: list[float] = []
    options = JointTextTraining(epochs=1, batch_size=8, tuned=0.25)
    train_joint_text(export, prompts, answers, exits=EXITS, options=options, progress=told.append)
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0.0, 1.0)


def test_a_time_limit_ends_training() -> None:
    export, prompts, answers = taught()
    told: list[float] = []
    options = JointTextTraining(epochs=1000, minutes=1e-6, batch_size=8)
    train_joint_text(export, prompts, answers, exits=EXITS, options=options, progress=told.append)
    assert told[-1] == 1.0
    assert len(told) <= 2


def test_a_decoder_of_one_token_a_step_is_refused() -> None:
    export, prompts, answers = taught(encodes=True, tokens=1)
    with pytest.raises(UntrainableError, match="takes only one token per step"):
        train_joint_text(
            export, prompts, answers, exits=EXITS, start_token=START, options=UNTRAINED
        )


def test_answers_that_are_not_the_models_own_are_refused() -> None:
    export, prompts, answers = taught()
    with pytest.raises(UntrainableError, match="pass its own greedy answers"):
        train_joint_text(export, prompts, [a[::-1] for a in answers], exits=EXITS, options=OPTIONS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"exits": (3, 1)}, r"exits are wanted after layers \[3, 1\]"),
        ({"exits": ()}, r"exits are wanted after layers \[\]"),
        ({"exits": (LAYERS,)}, f"increasing numbers from 1 to {LAYERS - 1}"),
        ({"answers": []}, "40 prompts and 0 answers"),
        ({"answers": [np.zeros(0, np.int64)] * PROMPTS}, "is empty"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, Any], says: str) -> None:
    export, prompts, answers = taught()
    given = {"prompts": prompts, "answers": answers, "exits": EXITS} | change
    with pytest.raises(ValueError, match=says):
        train_joint_text(export, options=UNTRAINED, **given)


def test_an_encoder_decoder_needs_a_start_token() -> None:
    export, prompts, answers = taught(encodes=True)
    with pytest.raises(ValueError, match="needs a start token"):
        train_joint_text(export, prompts, answers, exits=EXITS, options=UNTRAINED)
