"""What exits may do with an answer, and what watches over them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, Final

from offramp.engine.options import CONTROLLERS, EngineOptions, ModelOptions
from offramp.engine.plan import Mode
from offramp.server.arguments.groups import setting_adder
from offramp.server.arguments.values import mode, number, share
from offramp.server.options import DEFAULT_MODE

MODES: Final[Mapping[Mode, str]] = {
    Mode.AUDIT: "a sample that is sure enough at an exit leaves there; a few of those,\n"
    "drawn by chance, run on after their answer, so that disagreement\n"
    "with the unmodified model is measured, and kept within bounds",
    Mode.RELEASE: "it is answered there, and always runs on: no compute is saved, but\n"
    "everything is measured, and clients that stream get the final answer\n"
    "as well (Apparate)",
    Mode.LEAVE: "it leaves, and nothing is measured: thresholds stay as compiled, and\n"
    "what calibration promised holds while the data stay like it",
    Mode.OFF: "nothing leaves: the unmodified model, to compare with",
}
"""What each does, in the words of the help."""

CONTROLLER_WORDS: Final[Mapping[str, str]] = {
    "certified": "moves thresholds and exits only as far as evidence carries",
    "apparate": "tunes to what was just seen, as Apparate publishes it; promises nothing",
    "static": "changes nothing, measures only",
}
"""What each does, in half a line."""

_WATCHING: Final[Mapping[str, str]] = {
    "controller": "--controller",
    "max_disagreement": "--max-disagreement",
    "confidence": "--confidence",
    "audit_budget": "--audit-budget",
    "ramp_budget": "--ramp-budget",
    "keep_state": "--no-state",
}
"""Options that mean something only where answers are observed, by their fields."""


def add_control(parser: argparse.ArgumentParser) -> None:
    """Add the options; all are fields of :class:`EngineOptions` or :class:`ModelOptions`."""
    group = parser.add_argument_group(
        "control",
        "Of exits over their answers. Modes and controllers are described below; all but mode and\n"
        "state may differ between models in the configuration file.",
    )
    add = setting_adder(group, EngineOptions(mode=DEFAULT_MODE))
    add(
        "--mode",
        "what happens to a sample that is sure enough at an exit",
        metavar=f"{{{','.join(MODES)}}}",
        type=mode,
    )
    add = setting_adder(group, ModelOptions())
    add(
        "--max-disagreement",
        "largest share of answers that may differ from the unmodified model's, 0.01 for 1 %% "
        "(default: what the bundle was compiled for)",
        metavar="SHARE",
        type=share,
    )
    add(
        "--confidence",
        "how sure to be that it is kept; more takes longer to show",
        metavar="SHARE",
        type=share,
    )
    add(
        "--controller",
        "what watches, and moves thresholds and exits",
        choices=CONTROLLERS,
    )
    add(
        "--audit-budget",
        "largest share of all compute that audits may take, of audit mode",
        metavar="SHARE",
        type=share,
    )
    add(
        "--ramp-budget",
        "how much later the model's end may come for all exits in use, as a share of its time "
        "(default: 0.02 in release mode, else as much as those compiled in cost, at least 0.1)",
        metavar="SHARE",
        type=number(0.0),
    )
    group.add_argument(
        "--no-state",
        dest="keep_state",
        action="store_false",
        default=argparse.SUPPRESS,
        help="forget what the controller learned when the server ends (default: it is kept beside "
        "the bundle)",
    )
    parser.add_argument_group("modes", "\n".join(_describe(MODES)))
    parser.add_argument_group("controllers", "\n".join(_describe(CONTROLLER_WORDS)))


def refuse_ignored(given: Mapping[str, Any], mode: Mode) -> None:
    """Refuse options of the command line that would do nothing in a mode.

    What a configuration file says is not refused, so that one file serves in every mode.

    Args:
        given: Fields that the command line names.
        mode: That it is to serve in.

    Raises:
        ValueError: Names the option.
    """
    for field, flag in _WATCHING.items():
        if field in given and not mode.observed:
            raise ValueError(
                f"{flag} does nothing in mode {mode.value}, which observes nothing; "
                "leave it out, or choose --mode audit or release"
            )
    if "audit_budget" in given and mode is Mode.RELEASE:
        raise ValueError(
            "--audit-budget does nothing in mode release, where every sample runs to the end; "
            "leave it out, or choose --mode audit"
        )


def _describe(words: Mapping[Any, str]) -> Iterator[str]:
    for name, text in words.items():
        first, *rest = text.splitlines()
        yield f"  {name:<14} {first}"
        yield from (f"{'':<17}{line}" for line in rest)
