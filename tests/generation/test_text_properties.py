"""Every sequence ends once, with the tokens that it has alone, in all events."""

from __future__ import annotations

from collections import Counter

import pytest

from offramp.generation.scheduling import SequenceEnd
from tests.generation.random_life import Life


@pytest.mark.parametrize("policy", ["refill", "together"])
@pytest.mark.parametrize("block", range(4))
def test_random_lives(policy: str, block: int) -> None:
    ends: Counter[SequenceEnd] = Counter()
    retried = yielded = 0
    for seed in range(block * 20, block * 20 + 20):
        life = Life(seed, policy)
        life.run()
        life.check_ends()
        ends.update(ended.end for ended in life.ended.values())
        retried += life.scheduler.retried
        yielded += life.scheduler.yielded
    assert set(ends) == set(SequenceEnd)
    assert sum(ends.values()) > 800
    assert retried > 20
    assert yielded > 5 or policy == "together"  # which starts when few hold slots
