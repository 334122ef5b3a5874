"""Inputs that hold NaN or infinity are samples like others where the model's answers decide."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from tests.facts import tells
from tests.models import Builder

from offramp.bundle import Answer
from offramp.bundle.schema.answers import AnswerTask
from offramp.calibration.data.dataset import DataError, Dataset
from offramp.calibration.data.running import check_answers, check_unusual
from offramp.compiler.graphs.graph import serialised

NAN, INF = np.nan, np.inf


def model(*, imputes: bool) -> bytes:
    """Return a layer, after an imputer or without one."""
    b = Builder()
    x = b.input("x", ["batch", 3])
    if imputes:
        x = b.node("Where", b.node("IsNaN", x), b.constant(0.5, np.float32), x)
    b.linear(x, 3, 4, out="y")
    b.output("y", ["batch", 4])
    return serialised(b.build())


def data(*missing: int, samples: int = 9) -> Dataset:
    x = np.ones((samples, 3), np.float32)
    x[list(missing), 1] = NAN
    whole = Dataset(inputs={"x": x, "n": np.arange(samples)}, labels=None, sha256="0")
    return whole.subset(np.arange(samples))


def answer(kind: str = "classification", form: str = "logits") -> Answer:
    return Answer(output="y", classes=4, form=form, task=AnswerTask(kind=kind))  # type: ignore[arg-type]


def test_samples_that_an_imputer_takes_are_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_unusual(lambda: model(imputes=True), data(2, 5), answer(), threads=1)
    (told,) = caplog.messages
    tells(told, "2 of 9 samples", "NaN or infinite", "sample 2", "finite", "used")


def test_samples_that_nothing_takes_are_broken() -> None:
    told = (
        r"2 of 9 samples have NaN or infinite values in an input, first sample 2; the source model "
        r"answers calibration sample 2 with NaN or infinity; correct the model or remove the sample"
    )
    with pytest.raises(DataError, match=told):
        check_unusual(lambda: model(imputes=False), data(2, 5), answer(), threads=1)


def test_nothing_is_run_where_all_is_finite() -> None:
    check_unusual(lambda: pytest.fail("no model is needed"), data(), answer(), threads=1)


@pytest.mark.parametrize(
    ("kind", "form", "values", "decides"),
    [
        ("classification", "logits", [1, -INF, 2, -INF], True),
        ("classification", "logits", [-INF, -INF, -INF, -INF], False),
        ("classification", "logits", [1, INF, 2, 3], False),
        ("classification", "logits", [1, NAN, 2, 3], False),
        ("multi-label", "logits", [INF, -INF, 0, 1], True),
        ("multi-label", "logits", [INF, NAN, 0, 1], False),
        ("regression", "values", [1, -INF, 0, 1], False),
        ("token-classification", "logits", [[1, -INF], [-INF, 2]], True),
        ("token-classification", "logits", [[1, 2], [-INF, -INF]], False),
        ("segmentation", "logits", [[[1, -INF]], [[-INF, 2]]], True),
        ("pose", "values", [[[1, -INF]], [[-INF, -INF]]], False),
    ],
)
def test_an_answer_decides_where_a_choice_is_left(kind, form, values, decides) -> None:
    values, sources = np.array([values], np.float32), np.array([7])
    if decides:
        check_answers(values, sources, answer(kind, form))
        return
    with pytest.raises(DataError, match="calibration sample 7 with NaN or infinity"):
        check_answers(values, sources, answer(kind, form))
