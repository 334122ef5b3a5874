"""``--only`` of the benchmarks, which names experiments."""

from __future__ import annotations

import argparse

import pytest
from benchmarks.common import some_of
from tests.facts import facts


def test_known_experiments_are_taken_in_the_given_order() -> None:
    assert some_of(["mixes", "bursts", "forecast errors"])("forecast errors,mixes") == [
        "forecast errors",
        "mixes",
    ]


def test_unknown_experiments_are_refused_with_the_known_ones() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=facts("'nothing'", "mixes, bursts")):
        some_of(["mixes", "bursts"])("mixes,nothing")
