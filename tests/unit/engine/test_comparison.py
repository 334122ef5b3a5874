"""Answers that wait for the model's end: what the recorder learns of them, and when."""

from __future__ import annotations

import numpy as np
import pytest

from offramp.bundle import Answer
from offramp.bundle.schema.answers import AnswerTask
from offramp.certify import MODEL_END, UNKNOWN
from offramp.engine.requests.comparison import answer_log
from offramp.engine.requests.recorder import Recorder

PIXELS = Answer(
    output="y", classes=2, form="logits", task=AnswerTask(kind="segmentation", share=0.75)
)
TAGS = Answer(
    output="y",
    classes=2,
    form="logits",
    task=AnswerTask(kind="token-classification", share=0.75, mask="m"),
)


def maps(*of_pixels: str) -> np.ndarray:
    """[b, 2, 1, 4]: scores whose classes are the digits."""
    classes = np.array([[int(digit) for digit in pixels] for pixels in of_pixels])
    return np.eye(2, dtype=np.float32)[classes].transpose(0, 2, 1)[:, :, None]


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def confidence(count: int) -> np.ndarray:
    return np.full(count, 0.5, np.float32)


def test_nothing_is_known_before_the_end_and_all_of_it_then() -> None:
    recorder = Recorder(2)
    log = answer_log(PIXELS, recorder)
    recorder.start(ids(0, 1, 2), 1)
    log.begin(ids(0, 1, 2), {})
    log.record_answers(ids(0, 1, 2), 0, maps("0000", "0011", "1111"), confidence(3))
    log.record_answers(ids(0, 2), 1, maps("0001", "1110"), confidence(2))
    log.record_answers(ids(0, 2, 1), MODEL_END, maps("0001", "0000", "1011"), confidence(3))
    recorder.finish(ids(0, 1, 2))
    seen = recorder.take()
    assert seen is not None
    assert seen.final.tolist() == [1, 1, 1]
    assert seen.prediction.tolist() == [[1, 1, 0], [1, UNKNOWN, 0]]
    assert seen.confidence[0].tolist() == [0.5] * 3


def test_a_sample_that_leaves_is_forgotten_and_nothing_is_known_of_it() -> None:
    recorder = Recorder(1)
    log = answer_log(PIXELS, recorder)
    recorder.start(ids(0, 1), 1)
    log.begin(ids(0, 1), {})
    log.record_answers(ids(0, 1), 0, maps("0000", "1111"), confidence(2))
    recorder.finish(ids(0))
    log.forget(ids(0))
    log.record_answers(ids(1), MODEL_END, maps("1111"), confidence(1))
    recorder.finish(ids(1))
    seen = recorder.take()
    assert seen is not None
    assert seen.prediction.tolist() == [[UNKNOWN, 1]]
    assert seen.final.tolist() == [UNKNOWN, 1]


def test_masked_tokens_do_not_count_while_serving_either() -> None:
    recorder = Recorder(1)
    log = answer_log(TAGS, recorder)
    recorder.start(ids(0, 1), 1)
    log.begin(ids(0, 1), {"m": np.array([[1, 1, 0, 0], [1, 1, 1, 1]])})
    said = maps("0011", "0011")[:, :, 0].transpose(0, 2, 1)
    ends = maps("0000", "0000")[:, :, 0].transpose(0, 2, 1)
    log.record_answers(ids(0, 1), 0, said, confidence(2))
    log.record_answers(ids(0, 1), MODEL_END, ends, confidence(2))
    recorder.finish(ids(0, 1))
    seen = recorder.take()
    assert seen is not None
    assert seen.prediction.tolist() == [[1, 0]]


@pytest.mark.parametrize("relative", [True, False])
def test_an_end_that_comes_after_its_sample_was_lost_is_no_error(*, relative: bool) -> None:
    recorder = Recorder(1)
    answer = PIXELS if relative else Answer(output="y", classes=4, form="logits")
    log = answer_log(answer, recorder)
    recorder.start(ids(0), 1)
    log.begin(ids(0), {})
    recorder.lose(ids(0))
    log.forget(ids(0))
    given = maps("0000") if relative else np.eye(4)[:1]
    log.record_answers(ids(0), MODEL_END, given, confidence(1))
    assert recorder.take() is None or recorder.lost == 1
