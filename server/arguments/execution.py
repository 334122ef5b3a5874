"""What executes the models: backend, streams, threads."""

from __future__ import annotations

import argparse

from offramp.engine.backends.factory import BACKENDS
from offramp.engine.options import EngineOptions
from offramp.server.arguments.groups import setting_adder
from offramp.server.arguments.values import integer, share


def add_execution(parser: argparse.ArgumentParser) -> None:
    """Add the options; all are fields of :class:`EngineOptions`."""
    group = parser.add_argument_group("execution")
    add = setting_adder(group, EngineOptions())
    add(
        "--backend",
        "what executes the stages; auto takes the fastest one here",
        choices=BACKENDS,
    )
    add(
        "--streams",
        "batches that run at the same time, of whatever models",
        metavar="N",
        type=integer(1),
    )
    add(
        "--threads",
        "threads of each stream (default: the cores, shared among the streams)",
        metavar="N",
        type=integer(1),
    )
    add = setting_adder(group.add_mutually_exclusive_group(), EngineOptions())
    add(
        "--parallel-below",
        "a new batch starts beside running ones once each has fewer samples than this (PAME's "
        "tau_b); not given: on any idle stream",
        metavar="N",
        type=integer(1),
    )
    add(
        "--max-violations",
        "instead, let that number follow from the share of late samples that is tolerated "
        "(PAME's tau_l), above 0 and below 1",
        metavar="SHARE",
        type=share,
    )
