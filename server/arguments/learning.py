"""Options of ``eeserve`` about learning: exits for ONNX files, made while these are served."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from offramp.engine.models.learning_options import LearnOptions
from offramp.server.arguments.values import integer, number

_FIELDS: Final = {
    "learn_samples": "samples",
    "learn_folder": "folder",
    "learn_gib": "max_gib",
    "learn_keep": "keep",
}
"""Fields of :class:`LearnOptions` by the name in the namespace."""


def add_learning(parser: argparse.ArgumentParser) -> None:
    """Add the options; what is not given is absent from the namespace."""
    group = parser.add_argument_group(
        "learning",
        "ONNX files get exits while they are served: a sample of their inputs is\n"
        "recorded, exits are compiled from it at low priority, and the server goes on\n"
        "with them. Bundles are served as they are. See docs/learning.md.",
    )
    usual = LearnOptions()
    group.add_argument(
        "--learn",
        dest="learning",
        action="store_true",
        default=argparse.SUPPRESS,
        help="make exits for ONNX files while they are served;\nneeds the extra compile: pip "
        "install 'offramp[compile]'",
    )
    group.add_argument(
        "--learn-samples",
        metavar="N",
        type=integer(1),
        default=argparse.SUPPRESS,
        help=f"inputs to record for that (default: {usual.samples:,}).\nA promise of 1 %% at 95 %% "
        "confidence takes about 700; more inputs make better exits",
    )
    group.add_argument(
        "--learn-folder",
        metavar="DIR",
        type=Path,
        default=argparse.SUPPRESS,
        help="where each model has its folder NAME.learn, of recorded inputs, state and bundle "
        "(default: next to the ONNX file)",
    )
    group.add_argument(
        "--learn-gib",
        metavar="GIB",
        type=number(0.0, above=True),
        default=argparse.SUPPRESS,
        help="most that the recorded inputs of a model take on the disk (default: "
        f"{usual.max_gib:g})",
    )
    group.add_argument(
        "--learn-keep",
        action="store_true",
        default=argparse.SUPPRESS,
        help="keep the recorded inputs (default: they are removed once exits are compiled)",
    )


def learning_in(given: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of :class:`LearnOptions` that the command line sets."""
    return {f: getattr(given, name) for name, f in _FIELDS.items() if hasattr(given, name)}
