"""Findings of campaigns stay fixed; a short run of each; and planted defects are found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from random import Random

import pytest

from tests.facts import Told, tells
from tests.fuzz import mutators
from tests.fuzz.campaign import Campaign, make_campaign
from tests.fuzz.files import Npz
from tests.fuzz.runner import run
from tests.fuzz.subject import Subject
from tests.models import mlp

REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*-*"))


@pytest.fixture(scope="module")
def campaigns() -> Iterator[object]:
    """Makes each campaign once."""
    made: list[Campaign] = []

    @cache
    def of(name: str) -> Campaign:
        made.append(make_campaign(name))
        return made[-1]

    yield of
    for campaign in made:
        campaign.close()


@pytest.mark.parametrize("place", REGRESSIONS, ids=lambda place: place.name)
def test_what_was_found_stays_mended(place: Path, campaigns: object) -> None:
    assert callable(campaigns)
    campaigns(place.name.partition("-")[0]).check(place.read_bytes())


COUNTS = {
    "config": 1000,
    "npz": 600,
    "data": 1000,
    "onnx": 100,
    "weights": 1000,
    "state": 15,
    "recording": 2000,
    "cluster": 400,
    "plan": 2000,
    "frames": 3000,
    "greetings": 1500,
    "messages": 1500,
    "server": 2000,
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [*COUNTS.items(), ("bundle", 40)])
def test_a_short_run_finds_nothing(name: str, count: int, tmp_path: Path) -> None:
    result = run(name, seed=1, seconds=200.0, count=count, folder=tmp_path)
    assert result.findings == {}, "\n".join(result.lines())
    assert result.counts.total() >= count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("Raises", ("IndexError", "planted.py:check")),
        ("AnswersWrongly", ("WrongError", "planted.py:check", "somebody else")),
        ("Ends", ("-6",)),
        ("TakesMemory", ("MemoryError", "planted.py:check")),
    ],
)
def test_what_is_planted_is_found_and_kept(kind: str, told: Told, tmp_path: Path) -> None:
    name = f"tests.fuzz.planted:{kind}"
    result = run(name, seed=0, seconds=60.0, count=40, folder=tmp_path)
    (found,) = result.findings
    tells(found, *told)
    kept = [p.read_bytes() for p in (tmp_path / "findings").iterdir() if p.suffix != ".txt"]
    assert kept == list(result.findings.values())
    assert result.counts.total() >= 40


def test_messages_are_taken_apart_and_put_together_again(tmp_path: Path) -> None:
    for message in (*(s[1:] for s in Subject.write(tmp_path).seeds()), mlp().SerializeToString()):
        fields = mutators.fields_of(message)
        assert fields is not None
        assert mutators.encode(fields) == message
    assert mutators.fields_of(b"\x0a\x05abc") is None
    assert mutators.fields_of(b"\xff" * 20) is None


@pytest.mark.parametrize("mutate", [mutators.havoc, mutators.protobuf, mutators.archive])
def test_mutations_differ_and_repeat_with_the_seed(mutate: object) -> None:
    assert callable(mutate)
    case = mlp().SerializeToString()
    if mutate is mutators.archive:
        with closing(Npz()) as npz:
            case = npz.seeds()[0]
    first, second = ([mutate(case, Random(seed)) for seed in range(60)] for _ in range(2))
    assert first == second
    assert len(set(first)) > 40
    assert mutate(b"", Random(0)) is not None
