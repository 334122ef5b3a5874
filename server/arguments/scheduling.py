"""How requests are scheduled: the defaults of all models."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Final

from offramp.engine.options import ModelOptions
from offramp.server.arguments.groups import setting_adder
from offramp.server.arguments.values import integer, number, policy

POLICY_GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "exits are taken by those who are sure enough, and by nobody else": {
        "run-through": "a batch runs through, and shrinks as samples leave (PAME)",
        "refill": "who is left waits at an exit until the batch is full again (E3)",
        "rebatch": "the same, but only where it costs less than it saves (DREX)",
        "clockwork": "the largest batch of which even the slowest is in time",
        "delay": "size and delay alone, as in Triton; deadlines order the queue",
    },
    "depth too follows from the time that is left: exits may be forced": {
        "slackfit": "the largest batch whose time is just within the slack (SuperServe)",
        "slackfit-bare": "the same as published, to compare with; may fall behind for good",
        "max-batch": "the largest batch first, then the deepest exit that still fits",
        "max-accuracy": "the deepest exit first, then the largest batch that still fits",
        "cheapest": "all leave at the first exit at the latest (INFaaS)",
        "fixed:K": "all leave at exit K at the latest; fixed:final is the model's end",
    },
}
"""What each does, in half a line."""


def add_scheduling(parser: argparse.ArgumentParser) -> None:
    """Add the options; all are fields of :class:`ModelOptions`."""
    group = parser.add_argument_group(
        "scheduling", "Of every model that the configuration file does not say otherwise of."
    )
    add = setting_adder(group, ModelOptions())
    add("--policy", "one of those below", metavar="NAME", type=policy, dest="scheduling")
    add(
        "--slo-ms",
        "deadline of requests that bring none (default: none)",
        metavar="MS",
        type=number(0.0, above=True),
    )
    add(
        "--max-batch-size",
        "most samples that run together; larger requests are split",
        metavar="N",
        type=integer(1),
    )
    add(
        "--max-queue-delay-ms",
        "longest wait for batch mates while a stream idles; of run-through, refill, rebatch, delay",
        metavar="MS",
        type=number(0.0),
    )
    add(
        "--max-queue-samples",
        "most samples that wait; more are refused",
        metavar="N",
        type=integer(1),
    )
    group.add_argument(
        "--forbid-forced-exits",
        dest="forced_exits",
        action="store_false",
        default=argparse.SUPPRESS,
        help="never make a sample leave at an exit that it is not sure enough at, however short "
        "its time: the promise of agreement then holds for every answer",
    )
    parser.add_argument_group("policies", "\n".join(_describe_policies()))


def _describe_policies() -> Iterator[str]:
    for heading, names in POLICY_GROUPS.items():
        yield f"{heading}:"
        for name, words in names.items():
            yield f"  {name:<14} {words}"
