"""What is logged, and how."""

from __future__ import annotations

import argparse

from offramp.server.logging_setup import FORMATS, LEVELS


def add_logging(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("logging")
    group.add_argument(
        "--log-level", choices=LEVELS, default="info", help="least level (default: %(default)s)"
    )
    group.add_argument(
        "--log-format",
        choices=FORMATS,
        default="human",
        help="lines for people, or a JSON object a line (default: %(default)s)",
    )
