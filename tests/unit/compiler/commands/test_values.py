"""Values of the command line that are refused, with the reason."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from offramp.compiler.commands import values


@pytest.mark.parametrize(
    ("read", "good", "bad", "reason"),
    [
        (values.share, "0.5", ["0", "1", "nan", "1%", "-1"], "is not a share: a number above 0"),
        (values.share_from_0, "0", ["1", "-0.1", "x"], "is not 0 or between 0 and 1"),
        (values.share_up_to_1, "1", ["0", "1.1", ""], "is not above 0, and at most 1"),
        (values.distance, "0", ["-1", "inf", "far"], "is no distance; give 0 or more"),
        (values.seconds, "9", ["0", "inf", "1m"], "is no number of seconds; give for instance"),
        (values.gib, "0.5", ["0", "inf", "4GB"], "is no number of GiB; give for instance 4"),
        (values.above_0, "1e3", ["0", "nan", "fast"], "is not a number above 0"),
        (values.positive, "1", ["0", "1.5", "many"], "is not a whole number above 0"),
        (values.seed, "0", ["-1", str(2**63), "1.5"], "is not a whole number from 0 to"),
        (values.tokens, "1,2", ["1;2", "yes"], "is not ids of tokens; give for instance 2152"),
    ],
)
def test_values_are_read_or_refused_with_the_reason(
    read: Callable[[str], Any], good: str, bad: list[str], reason: str
) -> None:
    read(good)
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError) as refused:
            read(text)
        assert str(refused.value).startswith(f"{text!r} {reason}")
