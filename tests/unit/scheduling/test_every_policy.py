"""The mechanism keeps its guarantees under any policy."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from tests.unit.scheduling.checks import Setup
from tests.unit.scheduling.machine import machine

LIVES = 40 if "THOROUGH" in os.environ else 15
"""Random lives of each policy; ``make test-all`` lives more of them."""
SETUPS = [
    Setup("run-through"),
    Setup("run-through", max_delay_s=1.0),
    Setup("run-through", max_delay_s=0.5, tau_b=3),
    Setup("run-through", tau_b=1),
    Setup("run-through", max_violations=0.1),
    Setup("refill"),
    Setup("refill", max_delay_s=1.0),
    Setup("refill", max_delay_s=1.0, tau_b=2),
    Setup("rebatch"),
    Setup("rebatch", max_delay_s=0.5),
    Setup("slackfit"),
    Setup("slackfit-bare"),
    Setup("max-accuracy"),
    Setup("max-batch"),
    Setup("fixed:0"),
    Setup("fixed:final"),
    Setup("cheapest"),
    Setup("clockwork"),
    Setup("delay", max_delay_s=0.75),
    Setup("run-through", feedback=True),
    Setup("run-through", tau_b=2, feedback=True, hot_swaps=True),
    Setup("run-through", max_violations=0.1, feedback=True, hot_swaps=True),
    Setup("run-through", max_delay_s=1.0, hot_swaps=True),
    Setup("refill", feedback=True),
    Setup("refill", hot_swaps=True),
    Setup("refill", max_delay_s=1.0, feedback=True, hot_swaps=True),
    Setup("rebatch", tau_b=3, feedback=True, hot_swaps=True),
    Setup("slackfit", feedback=True, hot_swaps=True),
    Setup("fixed:0", hot_swaps=True),
    Setup("fixed:1", feedback=True, hot_swaps=True),
    Setup("refill", placed=True),
    Setup("refill", max_delay_s=0.5, feedback=True, hot_swaps=True, placed=True),
    Setup("refill", tau_b=2, placed=True),
    Setup("rebatch", feedback=True, placed=True),
    Setup("rebatch", hot_swaps=True, placed=True),
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_every_sample_resolves_once_whatever_happens(setup: Setup) -> None:
    run_state_machine_as_test(
        machine(setup), settings=settings(max_examples=LIVES, stateful_step_count=40)
    )
