"""The facts of an error are found in their order, and a missing one is named."""

from __future__ import annotations

import re

import pytest
from tests.facts import facts, tells

SAID = "batch is 0 (of 'm.onnx'); expected 1 to 8:\ngive --batch 1"


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (("batch is 0 (of 'm.onnx')", "1 to 8", "--batch 1"), True),  # over lines too
        (("1 to 8", "batch is 0"), False),
        (("batch is 0", "batch is 0"), False),  # told once only
        (("1.to.8",), False),
    ],
)
def test_facts_are_found_word_for_word_and_in_order(told: tuple[str, ...], found: bool) -> None:
    assert bool(re.search(facts(*told), SAID)) is found
    if found:
        tells(SAID, *told)
    else:
        with pytest.raises(AssertionError):
            tells(SAID, *told)


def test_a_missing_fact_is_named_with_the_one_before() -> None:
    with pytest.raises(AssertionError, match=facts("fact 2, '1 to 9'", "after 'batch is 0'", SAID)):
        tells(SAID, "batch is 0", "1 to 9", "--batch 1")
