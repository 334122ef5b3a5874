"""Values of the command line that are refused, with the reason."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest
from tests.facts import Told, facts

from offramp.compiler.commands import values


@pytest.mark.parametrize(
    ("read", "good", "bad", "reason"),
    [
        (values.share, "0.5", ["0", "1", "nan", "1%", "-1"], ("share", "above 0")),
        (values.share_from_0, "0", ["1", "-0.1", "x"], ("0", "between 0 and 1")),
        (values.share_up_to_1, "1", ["0", "1.1", ""], ("above 0", "at most 1")),
        (values.distance, "0", ["-1", "inf", "far"], ("distance", "0 or more")),
        (values.seconds, "9", ["0", "inf", "1m"], ("number of seconds", "use")),
        (values.gib, "0.5", ["0", "inf", "4GB"], ("GiB", "4")),
        (values.above_0, "1e3", ["0", "nan", "fast"], ("is not a number above 0",)),
        (values.positive, "1", ["0", "1.5", "many"], ("whole number above 0",)),
        (values.seed, "0", ["-1", str(2**63), "1.5"], ("whole number", "from 0")),
        (values.tokens, "1,2", ["1;2", "yes"], ("ids of tokens", "2152")),
    ],
)
def test_values_are_read_or_refused_with_the_reason(
    read: Callable[[str], Any], good: str, bad: list[str], reason: Told
) -> None:
    read(good)
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=facts(repr(text), *reason)):
            read(text)
