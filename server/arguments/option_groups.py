"""Option groups of ``eeserve`` whose options the configuration file may set as well."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from offramp.bundle.engines import PRECISIONS
from offramp.engine.backends.factory import BACKENDS
from offramp.engine.models.learning_options import LearnOptions
from offramp.engine.models.options import (
    MOST_SHARE,
    SHARE_WEIGHTS,
    EngineOptions,
    ModelOptions,
    added_controllers,
)
from offramp.engine.models.weight_sharing import MOST_MORE_TIME
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.stages.plan import Mode
from offramp.server.arguments.options import (
    DEFAULT_MODE,
)


def named_path(text: str) -> tuple[str, Path]:
    """Parse a model's name and path from ``NAME=PATH``."""
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is not NAME=PATH, for instance resnet=/models/resnet.ee"
        )
    return name, Path(path)


def model_path(text: str) -> Path:
    """Parse a model's path; ``NAME=PATH`` is refused with the option that takes it."""
    path = Path(text)
    _, separator, named = text.partition("=")
    if separator and not path.exists() and Path(named).exists():
        raise argparse.ArgumentTypeError(
            f"{text!r:.80}: a model with a name of its own is given as --model {text}"
        )
    return path


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers in [least, most]."""
    span = f"from {least} to {most}" if most is not None else f"from {least} on"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text!r:.80} is not a whole number {span}")
        return value

    return parse


def number(least: float, *, above: bool = False) -> Callable[[str], float]:
    """Return a parser of finite numbers ≥ ``least``, or > ``least`` if ``above``."""
    span = f"above {least:g}" if above else f"from {least:g} on"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least < value < math.inf if above else least <= value < math.inf):
            raise argparse.ArgumentTypeError(f"{text!r:.80} is not a number {span}")
        return value

    return parse


port = integer(0, 65535)
"""Parser of port numbers; 0 chooses any free port."""


def share(text: str) -> float:
    """Parse a number above 0, at most :data:`.MOST_SHARE`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= MOST_SHARE:
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is not a share: a number above 0 and below 1"
        )
    return value


def policy(text: str) -> PolicyName:
    """Parse the name of a scheduling policy."""
    try:
        return PolicyName.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def mode(text: str) -> Mode:
    """Parse the name of a :class:`Mode`."""
    try:
        return Mode(text)
    except ValueError:
        known = ", ".join(repr(known.value) for known in Mode)
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is not a mode; choose from {known}"
        ) from None


class OptionGroup:
    """A group of options that are fields of dataclasses, with the fields' defaults.

    An option that the user leaves out is absent from the namespace, so that the configuration file
    applies, or else the field's default.
    """

    def __init__(
        self, parser: argparse.ArgumentParser, title: str, text: str | None, *defaults: object
    ) -> None:
        """``defaults`` are instances of the dataclasses; no two have a field of the same name."""
        self._group = parser.add_argument_group(title, text)
        self._defaults = {
            name: value for each in defaults for name, value in values_of(each).items()
        }

    def add(
        self, flag: str, text: str, *, completions: Sequence[str] | None = None, **how: Any
    ) -> None:
        """Add an option; ``how`` holds further arguments of ``add_argument``.

        ``completions`` are values that a shell offers for an option without ``choices``. The help
        text ends with the default, unless the default is ``None`` or the text already names it.
        """
        how.setdefault("dest", flag.removeprefix("--").replace("-", "_"))
        default = self._defaults.get(how["dest"])
        if default is not None and "default: " not in text:
            text = f"{text} (default: {_shown(default)})"
        option = self._group.add_argument(flag, default=argparse.SUPPRESS, help=text, **how)
        if completions is not None:
            option.completer = lambda **_: completions  # type: ignore[attr-defined]

    def switch(self, flag: str, text: str, **how: Any) -> None:
        """Add an option without a value, which inverts the default of its field."""
        dest = how.setdefault("dest", flag.removeprefix("--").replace("-", "_"))
        action = "store_false" if self._defaults.get(dest) else "store_true"
        self._group.add_argument(flag, action=action, default=argparse.SUPPRESS, help=text, **how)


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:g}" if isinstance(default, float) else str(default)


def values_of(options: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, without copying the values."""
    return {field.name: getattr(options, field.name) for field in fields(options)}


def settings_in(given: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    """Return the fields of ``kind`` that the command line sets, by name."""
    return {f.name: getattr(given, f.name) for f in fields(kind) if hasattr(given, f.name)}


MODES: Final[Mapping[Mode, str]] = {
    Mode.AUDIT: "exits answer the samples that they are sure enough of; a small random share of "
    "these runs on after the answer, so that disagreement with the unmodified model is measured "
    "and kept within the bound",
    Mode.RELEASE: "exits answer, and every sample runs on: no compute is saved, everything is "
    "measured, and streaming clients get the final answer too (Apparate)",
    Mode.LEAVE: "exits answer, and nothing is measured: thresholds stay as compiled, and the "
    "promise holds as long as the data resemble the calibration data",
    Mode.OFF: "no exit answers: the unmodified model, for comparison",
}
"""Descriptions of the modes for the help."""


def controller_words() -> dict[str, str]:
    """Return descriptions of the controllers, for the help."""
    return {
        "certified": "changes thresholds and exits only as far as the evidence allows",
        **{name: kind.description for name, kind in added_controllers().items()},
        "static": "changes nothing, only measures",
    }


_WIDTH: Final = 78
_INDENT: Final = 19
"""Width of a description and of its indentation, in columns."""

_SHARE: Final[Mapping[str, Any]] = {"metavar": "SHARE", "type": share}
_COUNT: Final[Mapping[str, Any]] = {"metavar": "N", "type": integer(1)}


def add_control(parser: argparse.ArgumentParser) -> None:
    """Add the control options, all fields of :class:`EngineOptions` or :class:`ModelOptions`."""
    options = OptionGroup(
        parser,
        "control",
        "Control of the exits. Modes and controllers are described below. In the\n"
        "configuration file each model may have its own settings, except for mode, state\n"
        "and profile.",
        EngineOptions(mode=DEFAULT_MODE),
        ModelOptions(),
    )
    options.add(
        "--mode",
        f"audit, off (the unmodified model), release or leave (default: {DEFAULT_MODE.value})",
        metavar="MODE",
        type=mode,
        completions=[each.value for each in Mode],
    )
    options.switch(
        "--uncertified-exits",
        "let exits answer in a bundle that was compiled on random inputs (a dry run), where "
        "nothing is certified (default: its unmodified model is served)",
    )
    options.add(
        "--max-disagreement",
        "largest share of answers that may differ from the unmodified model's, 0.01 for 1 %% "
        "(default: as compiled)",
        **_SHARE,
    )
    options.add(
        "--confidence",
        "confidence level of the bound --max-disagreement; a higher level takes longer to certify",
        **_SHARE,
    )
    options.add(
        "--controller",
        "what changes thresholds and exits while serving",
        metavar="NAME",
        choices=tuple(controller_words()),
    )
    options.add("--audit-budget", "largest share of all compute that audits may use", **_SHARE)
    options.add(
        "--ramp-budget",
        "extra time of the whole model that all exits in use may cost, as a share of its time "
        "(default: 0.02 where every sample runs on, as in release mode, else the cost of the "
        "compiled exits, at least 0.1)",
        metavar="SHARE",
        type=number(0.0),
    )
    options.switch(
        "--no-state",
        "do not save what the controller learned and the batch profile (default: "
        "both are saved next to the bundle)",
        dest="keep_state",
    )
    options.switch(
        "--trust-inputs",
        "let exits answer samples with values that are not finite or far outside the "
        "calibration data, and let the controller learn from them (default: the whole model "
        "answers them, and they are excluded from the evidence)",
    )
    options.add(
        "--max-source-share",
        "largest share of one client host in the last 4,096 samples, from which the "
        "controller learns; below 1, one client cannot dominate it for long (default: no bound)",
        **_SHARE,
    )
    options.switch(
        "--never-beyond-compiled",
        "never let exits answer more samples than the compiled policy does: the controller can "
        "only become more conservative",
    )
    parser.add_argument_group("modes", "\n".join(_describe(MODES)))
    parser.add_argument_group("controllers", "\n".join(_describe(controller_words())))


def _describe(words: Mapping[Any, str]) -> Iterator[str]:
    for name, text in words.items():
        first, *rest = textwrap.wrap(text, _WIDTH - _INDENT)
        yield f"  {name:<{_INDENT - 4}}{first}"
        yield from (f"{'':<{_INDENT - 2}}{line}" for line in rest)


def add_execution(parser: argparse.ArgumentParser) -> None:
    """Add the execution options, all fields of :class:`EngineOptions`."""
    options = OptionGroup(parser, "execution", None, EngineOptions())
    options.add(
        "--backend",
        f"engine that runs the model: {', '.join(BACKENDS[1:])} (on the CPU), or auto, the first "
        "of these that works here; cuda is ONNX Runtime on a GPU, tensorrt needs engines from "
        "eecompile build",
        metavar="NAME",
        choices=BACKENDS,
    )
    options.add(
        "--device",
        "GPU for tensorrt and cuda; or several GPUs for one model, separated by commas, across "
        "which the streams are distributed",
        metavar="cuda:N",
    )
    options.add(
        "--precision",
        f"precision of TensorRT's engines: {', '.join(PRECISIONS)} (default: the lowest that was "
        "built)",
        metavar="NAME",
        choices=PRECISIONS,
    )
    options.switch(
        "--no-cuda-graphs",
        "launch each kernel separately on a GPU (default: each stage and batch size is "
        "captured once as a graph, and launched as a whole)",
        dest="graphs",
    )
    options.add(
        "--engine-build-minutes",
        "minutes per hour in which tensorrt may build engines while serving, for exits that the "
        "controller starts to use; batches take longer during a build (default: 0, none is built, "
        "and such stages run as several engines)",
        metavar="MINUTES",
        type=number(0.0),
    )
    options.add(
        "--streams", "batches that run at the same time (1: one for each GPU of --device)", **_COUNT
    )
    options.add(
        "--threads",
        "CPU threads of each stream (default: an equal share)",
        **_COUNT,
    )
    options.add(
        "--parallel-below",
        "start a batch while others run once each of these has fewer samples than this "
        "(PAME's tau_b; default: on any idle stream)",
        **_COUNT,
    )
    options.add(
        "--max-violations",
        "choose the number of --parallel-below by the tolerated share of late samples "
        "(PAME's tau_l)",
        **_SHARE,
    )


POLICY_GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "an exit answers only samples that it is sure enough of": {
        "run-through": "a batch runs through, and shrinks as samples are answered (PAME)",
        "refill": "samples wait at a split until the batch is full again (E3)",
        "rebatch": "like refill, but only where waiting saves more than it costs (DREX)",
        "clockwork": "the largest batch in which even the slowest sample is in time",
        "delay": "batches by size and delay only, as in Triton; earliest deadline first",
    },
    "the time left also decides the depth: exits may be forced": {
        "slackfit": "the deepest exit that slack and queue allow, while the server keeps up "
        "(after SuperServe)",
        "slackfit-bare": "the published rule, for comparison; may fall behind permanently",
        "max-batch": "the largest batch first, then the deepest exit that fits",
        "max-accuracy": "the deepest exit first, then the largest batch that fits",
        "cheapest": "all samples are answered by the first exit at the latest (INFaaS)",
        "fixed:K": "all samples are answered by exit K at the latest; fixed:final is the "
        "model's end",
    },
}
"""Descriptions of the scheduling policies for the help."""


def add_scheduling(parser: argparse.ArgumentParser) -> None:
    """Add the scheduling options, all fields of :class:`ModelOptions`."""
    options = OptionGroup(
        parser,
        "scheduling",
        "For every model without its own setting in the configuration file.",
        ModelOptions(),
    )
    options.add(
        "--policy",
        "how requests are batched: run-through, slackfit, … (default: "
        f"{ModelOptions().scheduling})",
        metavar="NAME",
        type=policy,
        dest="scheduling",
        completions=[name for group in POLICY_GROUPS.values() for name in group],
    )
    options.add(
        "--slo-ms",
        "deadline of requests that set none (default: none)",
        metavar="MS",
        type=number(0.0, above=True),
    )
    options.add("--max-batch-size", "largest number of samples in a batch", **_COUNT)
    options.add(
        "--max-queue-delay-ms",
        "longest wait to fill a batch while a stream is idle; for run-through, "
        "refill, rebatch and delay (default: 0, none)",
        metavar="MS",
        type=number(0.0),
    )
    options.add(
        "--max-queue-samples",
        "largest number of waiting samples; further samples are refused",
        **_COUNT,
    )
    options.switch(
        "--no-padding",
        "batch only samples of equal length (default: samples of similar length are padded, "
        "where this changes no answer by more than rounding)",
        dest="padding",
    )
    options.switch(
        "--forbid-forced-exits",
        "never force a sample out at an exit that is not sure enough, even if it is late: "
        "the promise then holds for every answer",
        dest="forced_exits",
    )
    options.add(
        "--share-weights",
        "keep one copy of the weights in memory for a model and its variants, which is slower: "
        "always, never, or auto: for the variants that become at most "
        f"{MOST_MORE_TIME:.0%} slower".replace("%", "%%"),
        metavar="WHEN",
        choices=SHARE_WEIGHTS,
    )
    parser.add_argument_group("policies", "\n".join(_describe_policies()))


def _describe_policies() -> Iterator[str]:
    for heading, names in POLICY_GROUPS.items():
        yield from (f"{heading}:", *_describe(names))


_FIELDS: Final = {
    "learn_samples": "samples",
    "learn_folder": "folder",
    "learn_gib": "max_gib",
    "learn_keep": "keep",
}
"""Fields of :class:`LearnOptions` by their names in the namespace."""


def add_learning(parser: argparse.ArgumentParser) -> None:
    """Add the learning options; options that are left out are absent from the namespace."""
    options = OptionGroup(
        parser,
        "learning",
        "ONNX files get exits while they are served: a sample of their inputs is\n"
        "recorded, exits are compiled from it at low priority, and the server then uses\n"
        "them. Bundles are served as they are. See docs/learning.md.",
    )
    usual = LearnOptions()
    options.switch(
        "--learn",
        "make exits for ONNX files while they are served;\nneeds the extra compile: pip "
        "install 'offramp[compile]'",
        dest="learning",
    )
    options.add(
        "--learn-samples",
        f"inputs to record for learning (default: {usual.samples:,}).\nA promise of 1 %% at 95 %% "
        "confidence takes about 700; more inputs make better exits",
        metavar="N",
        type=integer(1),
    )
    options.add(
        "--learn-folder",
        "folder for each model's folder NAME.learn, with recorded inputs, state and bundle "
        "(default: next to the ONNX file)",
        metavar="DIR",
        type=Path,
    )
    options.add(
        "--learn-gib",
        "largest disk space for the recorded inputs of a model, in GiB (default: "
        f"{usual.max_gib:g})",
        metavar="GIB",
        type=number(0.0, above=True),
    )
    options.switch(
        "--learn-keep",
        "keep the recorded inputs (default: removed once exits are compiled)",
    )


def learning_in(given: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of :class:`LearnOptions` that the command line sets."""
    return {f: getattr(given, name) for name, f in _FIELDS.items() if hasattr(given, name)}
