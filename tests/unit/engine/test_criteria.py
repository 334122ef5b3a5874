"""Criteria on the host: patience, users' own, and handling of their state and errors."""

from __future__ import annotations

import logging
from pathlib import Path

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp.bundle.schema.answers import Criterion
from offramp.engine.answers import criteria
from offramp.engine.answers.criteria import (
    STATE,
    CriterionError,
    HostCriterion,
    State,
    host_criterion,
    known_criterion,
    load_criterion,
    patience,
    register,
    state_in,
)
from offramp.engine.backends.host import HostSlot


@pytest.fixture(autouse=True)
def _registry_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteria, "_REGISTERED", dict(criteria._REGISTERED))
    monkeypatch.setattr(criteria, "_last_logged", {})


def counter_of(classes: list[int], exit_: int) -> int:
    """PABEE's counter at an exit: how many before it, one after the other, gave its class."""
    count = 0
    for earlier in reversed(classes[:exit_]):
        if earlier != classes[exit_] or earlier < 0:
            break
        count += 1
    return count


@given(hnp.arrays(np.int64, st.tuples(st.integers(1, 7), st.integers(1, 9)),
                  elements=st.integers(-1, 2)))  # fmt: skip
def test_patience_counts_what_a_loop_over_samples_counts(classes) -> None:
    state: State = {}
    for exit_, given_ in enumerate(classes):
        answers = np.full((len(given_), 3), -1, np.float32)
        answers[np.arange(len(given_)), given_] = 2
        answers[given_ < 0, 1] = np.nan
        confidence, state = patience(answers, state)
        counters = [counter_of(column.tolist(), exit_) for column in classes.T]
        counts = np.array(counters, np.float32)
        np.testing.assert_array_equal(confidence, counts / (counts + np.float32(1)))


def test_state_follows_its_rows_through_selection_and_merging() -> None:
    slot = HostSlot()
    tensors = {"x": np.arange(4.0), STATE + "counter": np.array([3, 1, 4, 1])}
    first = slot.select(slot.upload(tensors), np.array([0, 2]))
    merged = slot.merge([(first, np.array([1])), (slot.upload(tensors), np.array([1, 3]))])
    assert state_in(merged.tensors)["counter"].tolist() == [4, 1, 1]
    without = slot.upload({"x": np.arange(2.0)})
    mixed = slot.merge([(slot.upload(tensors), np.array([0])), (without, np.array([1]))])
    assert state_in(mixed.tensors) == {}
    assert mixed.tensors["x"].tolist() == [0, 1]


def test_users_functions_are_registered_by_name_and_found() -> None:
    @register("half")
    def half(answers):
        return np.full(len(answers), 0.5)

    found = host_criterion(known_criterion("half"))
    assert found is not None
    assert found.function is half
    confidence, state = found.apply(np.zeros((3, 2), np.float16), {})
    assert confidence.dtype == np.float32
    assert (confidence.tolist(), state) == ([0.5, 0.5, 0.5], {})
    assert host_criterion(known_criterion("entropy")) is None
    for name, message in (("patience", "built in"), ("Not good", "lower-case letters")):
        with pytest.raises(ValueError, match=message):
            register(name, half)
    with pytest.raises(CriterionError, match=r"no criterion is called 'halv'.*--criterion-module"):
        known_criterion("halv")
    with pytest.raises(CriterionError, match="not registered; pass its file: --criterion-module"):
        host_criterion(Criterion(name="halv"))
    with pytest.raises(CriterionError, match="compiled with True"):
        host_criterion(Criterion(name="half", depends_on_earlier=True))


def raises(_answers):
    raise KeyError("gone")


def changes(answers):
    answers[:] = 0


WRONG = {
    "raises": (raises, False, "raised KeyError"),
    "changes": (changes, False, "read-only"),
    "too large": (lambda a: np.full(len(a), 1.5), False, "from 1.5 to 1.5, expected .3. from 0"),
    "nan": (lambda a: np.full(len(a), np.nan), False, "without NaN"),
    "shape": (lambda a: a, False, r"shape \[3, 2\]"),
    "state": (lambda a, _: (a[:, 0], {"n": np.zeros(2)}), True, r"state 'n' .*\[2\], expected \[3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_function_that_is_wrong_is_an_error_and_serves_as_not_sure(case, caplog) -> None:
    function, depends, message = WRONG[case]
    criterion = HostCriterion("mine", function, depends)
    answers = np.zeros((3, 2), np.float32)
    with pytest.raises(CriterionError, match=message):
        criterion.apply(answers, {})
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            confidence, state = criterion.serve(answers, {})
            assert (confidence.tolist(), state) == ([0, 0, 0], {})
    assert len(caplog.records) == 1
    assert "none of 3 samples leaves there" in caplog.text


def test_files_bring_criteria(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from offramp.engine.answers.criteria import register\n"
        "def plain(answers):\n    return answers[:, 0] * 0 + 0.25\n"
        "@register('stately', depends_on_earlier=True)\n"
        "def stately(answers, state):\n    return answers[:, 0] * 0, state\n"
    )
    assert load_criterion(f"{file}:plain") == "plain"
    assert load_criterion(f"{file}:stately") == "stately"
    assert known_criterion("stately").depends_on_earlier
    assert not known_criterion("plain").depends_on_earlier
    (tmp_path / "bad.py").write_text("1 / 0")
    for text, message in (
        ("own.py", "expected FILE.py:NAME"),
        (f"{file}:absent", "registers no criterion 'absent'"),
        (f"{tmp_path / 'bad.py'}:x", "ZeroDivisionError"),
    ):
        with pytest.raises(CriterionError, match=message):
            load_criterion(text)
