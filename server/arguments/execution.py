"""What executes the models: backend, streams, threads."""

from __future__ import annotations

import argparse

from offramp.bundle.engines import PRECISIONS
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
        "what executes the stages: tensorrt, on engines of eecompile build; cuda, that is ONNX "
        "Runtime on a GPU; onnxruntime, on the CPU; auto takes the first of these that can be "
        "used here, and the log says which and why",
        choices=BACKENDS,
    )
    add("--device", "the GPU, for tensorrt and cuda", metavar="cuda:N")
    add(
        "--precision",
        "of the engines, for tensorrt (default: the least of those that were built)",
        choices=PRECISIONS,
    )
    group.add_argument(
        "--no-cuda-graphs",
        dest="graphs",
        action="store_false",
        default=argparse.SUPPRESS,
        help="enqueue every kernel of a stage by itself, for tensorrt (default: each stage and "
        "batch size is captured once and then launched as a whole)",
    )
    add(
        "--streams",
        "batches that run at the same time, of whatever models",
        metavar="N",
        type=integer(1),
    )
    add(
        "--threads",
        "threads of each stream, for onnxruntime (default: the cores, shared among the streams)",
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
