"""Options of ``eeserve`` that a configuration file may set too: the options of the engine."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Final

from offramp.bundle.engines import PRECISIONS
from offramp.engine.backends.factory import BACKENDS
from offramp.engine.models.options import CONTROLLERS, SHARE_WEIGHTS, EngineOptions, ModelOptions
from offramp.engine.models.weight_sharing import MOST_MORE_TIME
from offramp.engine.stages.plan import Mode
from offramp.server.arguments.options import DEFAULT_MODE
from offramp.server.arguments.values import integer, mode, number, policy, share


def option_adder(group: argparse._ArgumentGroup, defaults: object) -> Callable[..., None]:
    """Return a function ``add(flag, text, **how)`` that adds an option to a group.

    ``how`` is passed on to ``add_argument``, but for ``completions``: values that a shell offers
    where there are no ``choices``. The text ends with the default, unless that is
    ``None`` or the text names it. The option's name in the namespace is that of the field; an
    option that is not given is absent there, so that the configuration file, or else the field's
    default, counts.
    """

    def add(flag: str, text: str, **how: Any) -> None:
        field = how.pop("dest", flag.removeprefix("--").replace("-", "_"))
        completions = how.pop("completions", None)
        default = getattr(defaults, field)
        if default is not None and "default: " not in text:
            text = f"{text} (default: {_shown(default)})"
        option = group.add_argument(flag, dest=field, default=argparse.SUPPRESS, help=text, **how)
        if completions is not None:
            option.completer = lambda **_: completions  # type: ignore[attr-defined]

    return add


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:g}" if isinstance(default, float) else str(default)


def settings_in(given: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    """Return the fields of ``kind`` that the command line sets, by name."""
    return {f.name: getattr(given, f.name) for f in fields(kind) if hasattr(given, f.name)}


MODES: Final[Mapping[Mode, str]] = {
    Mode.AUDIT: "exits answer the samples that they are sure enough of; a few of these, drawn at "
    "random, run on after their answer, so that disagreement with the unmodified model is measured "
    "and kept within the bound",
    Mode.RELEASE: "exits answer, and every sample runs on: this saves no compute, measures "
    "everything, and clients that stream get the final answer too (Apparate)",
    Mode.LEAVE: "exits answer, and nothing is measured: thresholds stay as compiled, and the "
    "promise of calibration holds while the data stay like it",
    Mode.OFF: "no exit answers: the unmodified model, to compare with",
}
"""Descriptions of the modes in the help."""

CONTROLLER_WORDS: Final[Mapping[str, str]] = {
    "certified": "changes thresholds and exits only as far as evidence allows",
    "apparate": "tunes to the latest samples, as Apparate publishes it; promises nothing",
    "static": "changes nothing, only measures",
}
"""Descriptions of the controllers in the help."""

_WIDTH: Final = 78
_INDENT: Final = 19
"""Columns of a description, and in front of it."""

_SHARE: Final[Mapping[str, Any]] = {"metavar": "SHARE", "type": share}
_COUNT: Final[Mapping[str, Any]] = {"metavar": "N", "type": integer(1)}


def add_control(parser: argparse.ArgumentParser) -> None:
    """Add the options; all are fields of :class:`EngineOptions` or :class:`ModelOptions`."""
    group = parser.add_argument_group(
        "control",
        "Control of the exits. Modes and controllers are described below. In the\n"
        "configuration file each model may have settings of its own, but for mode, state\n"
        "and profile.",
    )
    add = option_adder(group, EngineOptions(mode=DEFAULT_MODE))
    add(
        "--mode",
        f"audit, off (the unmodified model), release or leave (default: {DEFAULT_MODE.value})",
        metavar="MODE",
        type=mode,
        completions=[each.value for each in Mode],
    )
    group.add_argument(
        "--uncertified-exits",
        action="store_true",
        default=argparse.SUPPRESS,
        help="let exits answer of a bundle that was compiled on random inputs (a dry run), which "
        "certify nothing (default: its unmodified model is served)",
    )
    add = option_adder(group, ModelOptions())
    add(
        "--max-disagreement",
        "largest share of answers that may differ from the unmodified model's, 0.01 for 1 %% "
        "(default: as compiled)",
        **_SHARE,
    )
    add(
        "--confidence",
        "confidence level of that bound; a higher one takes longer to certify",
        **_SHARE,
    )
    add(
        "--controller",
        "what changes thresholds and exits while serving",
        metavar="NAME",
        choices=CONTROLLERS,
    )
    add("--audit-budget", "largest share of all compute that audits may take", **_SHARE)
    add(
        "--ramp-budget",
        "how much longer the whole model may take for all exits in use, as a share of its time "
        "(default: 0.02 in release mode, else the cost of the compiled exits, at least 0.1)",
        metavar="SHARE",
        type=number(0.0),
    )
    group.add_argument(
        "--no-state",
        dest="keep_state",
        action="store_false",
        default=argparse.SUPPRESS,
        help="forget at the end what the controller learned, and the batch profile (default: "
        "they are kept next to the bundle)",
    )
    group.add_argument(
        "--trust-inputs",
        action="store_true",
        default=argparse.SUPPRESS,
        help="let exits answer, and the controller learn from, samples with values that are not "
        "finite or far outside the calibration data (default: the whole model answers them, and "
        "they are no evidence)",
    )
    add = option_adder(group, ModelOptions())
    add(
        "--max-source-share",
        "largest share that one client host may have of the last 4,096 samples, from which the "
        "controller learns; below 1, no single client can teach it for long (default: no bound)",
        **_SHARE,
    )
    group.add_argument(
        "--never-beyond-compiled",
        action="store_true",
        default=argparse.SUPPRESS,
        help="never let exits answer more than the compiled policy does: the controller can only "
        "become more conservative",
    )
    parser.add_argument_group("modes", "\n".join(_describe(MODES)))
    parser.add_argument_group("controllers", "\n".join(_describe(CONTROLLER_WORDS)))


def _describe(words: Mapping[Any, str]) -> Iterator[str]:
    for name, text in words.items():
        first, *rest = textwrap.wrap(text, _WIDTH - _INDENT)
        yield f"  {name:<{_INDENT - 4}}{first}"
        yield from (f"{'':<{_INDENT - 2}}{line}" for line in rest)


def add_execution(parser: argparse.ArgumentParser) -> None:
    """Add the options; all are fields of :class:`EngineOptions`."""
    group = parser.add_argument_group("execution")
    add = option_adder(group, EngineOptions())
    add(
        "--backend",
        f"what runs the model: {', '.join(BACKENDS[1:])} (on the CPU), or auto, the first of "
        "these that can be used here; cuda is ONNX Runtime on a GPU, tensorrt needs engines of "
        "eecompile build",
        metavar="NAME",
        choices=BACKENDS,
    )
    add("--device", "GPU of tensorrt and cuda", metavar="cuda:N")
    add(
        "--precision",
        f"precision of TensorRT's engines: {', '.join(PRECISIONS)} (default: the lowest that was "
        "built)",
        metavar="NAME",
        choices=PRECISIONS,
    )
    group.add_argument(
        "--no-cuda-graphs",
        dest="graphs",
        action="store_false",
        default=argparse.SUPPRESS,
        help="launch each kernel by itself on a GPU (default: each stage and batch size is "
        "captured once as a graph, and launched as a whole)",
    )
    add(
        "--engine-build-minutes",
        "minutes per hour in which tensorrt may build engines while serving, for exits that the "
        "controller starts to use; batches take longer meanwhile (default: 0, none is built, and "
        "such stages run as several engines)",
        metavar="MINUTES",
        type=number(0.0),
    )
    add("--streams", "batches that run at the same time", **_COUNT)
    add(
        "--threads",
        "CPU threads of a stream (default: an equal share)",
        **_COUNT,
    )
    add(
        "--parallel-below",
        "start a batch next to running ones once each of these has fewer samples than this "
        "(PAME's tau_b; default: on any idle stream)",
        **_COUNT,
    )
    add(
        "--max-violations",
        "choose that number by the share of late samples that is tolerated (PAME's tau_l)",
        **_SHARE,
    )


POLICY_GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "an exit answers only samples that it is sure enough of": {
        "run-through": "a batch runs through, and shrinks as samples are answered (PAME)",
        "refill": "samples wait at a split until the batch is full again (E3)",
        "rebatch": "the same, but only where it saves more than it costs (DREX)",
        "clockwork": "the largest batch of which even the slowest sample is in time",
        "delay": "batches by size and delay alone, as in Triton; earliest deadline first",
    },
    "the time left decides the depth too: exits may be forced": {
        "slackfit": "as deep as slack and queue allow, as long as it keeps up (after SuperServe)",
        "slackfit-bare": "the rule as published, to compare with; may fall behind for good",
        "max-batch": "the largest batch first, then the deepest exit that fits",
        "max-accuracy": "the deepest exit first, then the largest batch that fits",
        "cheapest": "all samples are answered by the first exit at the latest (INFaaS)",
        "fixed:K": "all are answered by exit K at the latest; fixed:final is the model's end",
    },
}
"""Descriptions of the scheduling policies in the help."""


def add_scheduling(parser: argparse.ArgumentParser) -> None:
    """Add the options; all are fields of :class:`ModelOptions`."""
    group = parser.add_argument_group(
        "scheduling", "For every model that has no setting of its own in the configuration file."
    )
    add = option_adder(group, ModelOptions())
    add(
        "--policy",
        "how requests are batched: run-through, slackfit, … (default: "
        f"{ModelOptions().scheduling})",
        metavar="NAME",
        type=policy,
        dest="scheduling",
        completions=[name for group in POLICY_GROUPS.values() for name in group],
    )
    add(
        "--slo-ms",
        "deadline of requests without one (default: none)",
        metavar="MS",
        type=number(0.0, above=True),
    )
    add("--max-batch-size", "most samples of a batch", **_COUNT)
    add(
        "--max-queue-delay-ms",
        "longest wait for more samples of a batch while a stream is idle; for run-through, "
        "refill, rebatch and delay (default: 0, none)",
        metavar="MS",
        type=number(0.0),
    )
    add("--max-queue-samples", "most samples that wait; more are refused", **_COUNT)
    group.add_argument(
        "--no-padding",
        dest="padding",
        action="store_false",
        default=argparse.SUPPRESS,
        help="batch only samples of equal length (default: samples of similar length are padded, "
        "where this changes no answer by more than rounding)",
    )
    group.add_argument(
        "--forbid-forced-exits",
        dest="forced_exits",
        action="store_false",
        default=argparse.SUPPRESS,
        help="never force a sample out at an exit that is not sure enough, however late it is: "
        "the promise then holds for every answer",
    )
    add(
        "--share-weights",
        "one copy of the weights in memory for a model and its variants, which takes longer: "
        "always, never, or auto: for the variants that take at most "
        f"{MOST_MORE_TIME:.0%} longer by it".replace("%", "%%"),
        metavar="WHEN",
        choices=SHARE_WEIGHTS,
    )
    parser.add_argument_group("policies", "\n".join(_describe_policies()))


def _describe_policies() -> Iterator[str]:
    for heading, names in POLICY_GROUPS.items():
        yield from (f"{heading}:", *_describe(names))
