"""Policies by name."""

from __future__ import annotations

import pytest
from tests.facts import facts
from tests.unit.scheduling.helpers import points_of, table

from offramp.certify.decision import MODEL_END
from offramp.engine.scheduling import OperatingPoints
from offramp.engine.scheduling.policies import POLICIES, PolicyName, make_policy, may_buffer

LATENCIES = table(first_s=1.0, more_s=0.5)


@pytest.mark.parametrize(
    "text",
    [
        *(name for name in POLICIES if name != "fixed"),
        "fixed:0",
        "fixed:12",
        "fixed:final",
        "fixed:final@1",
    ],
)
def test_names_are_read_as_they_are_written(text: str) -> None:
    chosen = PolicyName.parse(text)
    assert str(chosen) == text
    assert PolicyName.parse(str(chosen)) == chosen
    assert chosen.name == text.partition(":")[0]


def test_the_exit_of_fixed_is_read() -> None:
    assert PolicyName.parse("fixed:2") == PolicyName("fixed", 2)
    assert PolicyName.parse("fixed:final") == PolicyName("fixed", MODEL_END)
    assert PolicyName.parse("fixed:2@3") == PolicyName("fixed", 2, 3)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("slakfit", "did you mean 'slackfit'"),
        ("Refill", "did you mean 'refill'"),
        ("max-acuracy", "did you mean 'max-accuracy'"),
        ("slackfit:2", "no policy 'slackfit:2'"),
        ("slackfit:", "no policy 'slackfit:'"),
        ("", "known: run-through, refill, rebatch"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest_one(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        PolicyName.parse(text)


@pytest.mark.parametrize(
    "text", ["fixed", "fixed:", "fixed:last", "fixed:-1", "fixed:1.5", "fixed:1@", "fixed:1@x"]
)
def test_fixed_says_where(text: str) -> None:
    with pytest.raises(ValueError, match="has no exit; expected an exit"):
        PolicyName.parse(text)


@pytest.mark.parametrize("text", [*(n for n in POLICIES if n != "fixed"), "fixed:1", "fixed:final"])
def test_every_name_makes_its_policy(text: str) -> None:
    policy = make_policy(PolicyName.parse(text), points_of(LATENCIES), 4)
    assert policy.name == text.partition(":")[0]


def test_some_policies_merge_what_waits_at_a_split() -> None:
    names = [PolicyName.parse(name) for name in POLICIES if name != "fixed"]
    merging = [name.name for name in (*names, PolicyName("fixed", 0)) if may_buffer(name)]
    assert merging == ["refill", "rebatch"]


def test_an_exit_that_is_not_in_use_cannot_be_fixed() -> None:
    points = points_of(LATENCIES)
    with pytest.raises(ValueError, match=facts("fixed:7", "exit 7", "0, 1, final")):
        make_policy(PolicyName.parse("fixed:7"), points, 4)
    only_final = OperatingPoints(points=points.points[-1:], latencies=LATENCIES)
    with pytest.raises(ValueError, match=r"may not be forced; there are: final$"):
        make_policy(PolicyName.parse("fixed:0"), only_final, 4)
