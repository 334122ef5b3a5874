"""Options of learning exits while ONNX files are served."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from offramp.engine.learning.options import LearnOptions
from offramp.server.arguments.values import integer, number

_FIELDS = {
    "learn_samples": "samples",
    "learn_folder": "folder",
    "learn_gib": "max_gib",
    "learn_keep": "keep",
}
"""Fields of :class:`LearnOptions` by their names on the command line."""


def add_learning(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group(
        "learning",
        "Exits for models that are served as ONNX files. A sample of what is asked is recorded on\n"
        "the disk; a process of low priority compiles exits from it; then they answer.",
    )
    group.add_argument(
        "--learn",
        dest="learns",  # ``learn`` and ``learning`` are fields of the options
        action="store_true",
        help="record a sample of the inputs, compile exits from it beside serving, and go on with "
        "them",
    )
    default = LearnOptions()
    group.add_argument(
        "--learn-samples",
        metavar="N",
        type=integer(1),
        default=argparse.SUPPRESS,
        help=f"inputs to record before compiling (default: {default.samples:,})",
    )
    group.add_argument(
        "--learn-folder",
        metavar="DIR",
        type=Path,
        default=argparse.SUPPRESS,
        help="where each model has its folder NAME.learn (default: beside the model's file)",
    )
    group.add_argument(
        "--learn-gib",
        metavar="GIB",
        type=number(0.0, above=True),
        default=argparse.SUPPRESS,
        help=f"most that a model's recorded inputs take on the disk (default: {default.max_gib:g})",
    )
    group.add_argument(
        "--learn-keep",
        action="store_true",
        default=argparse.SUPPRESS,
        help="keep recorded inputs once exits are compiled from them (default: they are removed)",
    )


def learning_in(given: argparse.Namespace) -> dict[str, Any] | None:
    """Return the fields of :class:`LearnOptions` that are given; ``None`` without ``--learn``."""
    fields = {
        field: getattr(given, name) for name, field in _FIELDS.items() if hasattr(given, name)
    }
    return fields if given.learns else None
