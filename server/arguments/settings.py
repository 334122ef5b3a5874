"""Options of ``eeserve`` that a configuration file may set too: the engine's own options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, TypeAlias

from offramp.bundle.engines import PRECISIONS
from offramp.engine.backends.factory import BACKENDS
from offramp.engine.options import CONTROLLERS, SHARE_WEIGHTS, EngineOptions, ModelOptions
from offramp.engine.plan import Mode
from offramp.engine.weight_sharing import MOST_MORE_TIME
from offramp.server.arguments.values import integer, mode, number, policy, share
from offramp.server.options import DEFAULT_MODE, KeepaliveOptions, ServerOptions

_Defaults: TypeAlias = EngineOptions | ModelOptions | ServerOptions | KeepaliveOptions


def option_adder(group: argparse._ArgumentGroup, defaults: _Defaults) -> Callable[..., None]:
    """A function ``add(flag, text, **how)`` that adds an option to a group.

    ``how`` is what ``add_argument`` takes beside. The text names the default, unless that is
    ``None``. The option's name in the namespace is that of the field; where it is not given it is
    absent there, so that the configuration file, or else the field's default, counts.
    """

    def add(flag: str, text: str, **how: Any) -> None:
        field = how.pop("dest", flag.removeprefix("--").replace("-", "_"))
        default = getattr(defaults, field)
        told = text if default is None else f"{text} (default: {default})"
        group.add_argument(flag, dest=field, default=argparse.SUPPRESS, help=told, **how)

    return add


def settings_in(given: argparse.Namespace, kind: type[_Defaults]) -> dict[str, Any]:
    """The fields of ``kind`` that the command line sets, by name."""
    return {f.name: getattr(given, f.name) for f in fields(kind) if hasattr(given, f.name)}


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
    "trust_inputs": "--trust-inputs",
    "max_source_share": "--max-source-share",
    "never_beyond_compiled": "--never-beyond-compiled",
}
"""Options that mean something only where answers are observed, by their fields."""

_RECORDING: Final[Mapping[str, str]] = {
    "keep_state": "--no-state",
    "profile_window_s": "--profile-window-s",
}
"""Options that mean something only where exits run, by their fields."""

_SHARE: Final[Mapping[str, Any]] = {"metavar": "SHARE", "type": share}
_COUNT: Final[Mapping[str, Any]] = {"metavar": "N", "type": integer(1)}


def add_control(parser: argparse.ArgumentParser) -> None:
    """Add the options; all are fields of :class:`EngineOptions` or :class:`ModelOptions`."""
    group = parser.add_argument_group(
        "control",
        "Of exits over their answers. Modes and controllers are described below; all but mode and\n"
        "state may differ between models in the configuration file.",
    )
    add = option_adder(group, EngineOptions(mode=DEFAULT_MODE))
    add(
        "--mode",
        "what happens to a sample that is sure enough at an exit",
        metavar=f"{{{','.join(MODES)}}}",
        type=mode,
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
        "(default: what the bundle was compiled for)",
        **_SHARE,
    )
    add("--confidence", "how sure to be that it is kept; more takes longer to show", **_SHARE)
    add("--controller", "what watches, and moves thresholds and exits", choices=CONTROLLERS)
    add(
        "--audit-budget",
        "largest share of all compute that audits may take, of audit mode",
        **_SHARE,
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
        help="forget what the controller learned, and the batch profile, when the server ends "
        "(default: they are kept beside the bundle)",
    )
    add = option_adder(group, EngineOptions())
    add(
        "--profile-window-s",
        "seconds of a window of the batch profile: how many rows go on behind each exit, which "
        "eecompile plan forecasts from",
        metavar="S",
        type=number(1.0),
    )
    group.add_argument(
        "--trust-inputs",
        action="store_true",
        default=argparse.SUPPRESS,
        help="let exits answer, and learn from, samples with elements that are not finite or far "
        "outside of what calibration saw (default: the whole model answers them, and they are no "
        "evidence)",
    )
    add = option_adder(group, ModelOptions())
    add(
        "--max-source-share",
        "largest share that the samples of one client host have of the evidence that control "
        "learns from: of the last 4,096 samples; below 1, a single client can teach it nothing new "
        "for long (default: no bound)",
        **_SHARE,
    )
    group.add_argument(
        "--never-beyond-compiled",
        action="store_true",
        default=argparse.SUPPRESS,
        help="never let exits answer more than the compiled policy does: what is served can make "
        "control more conservative, never more aggressive",
    )
    parser.add_argument_group("modes", "\n".join(_describe(MODES)))
    parser.add_argument_group("controllers", "\n".join(_describe(CONTROLLER_WORDS)))


def refuse_ignored(given: Mapping[str, Any], mode: Mode) -> None:
    """Refuse fields that the command line gives and that would do nothing in a mode: ValueError.

    What a configuration file says is not refused, so that one file serves in every mode.
    """
    for field, flag in _WATCHING.items():
        if field in given and not mode.observed:
            raise ValueError(
                f"{flag} does nothing in mode {mode.value}, which observes nothing; "
                "leave it out, or choose --mode audit or release"
            )
    for field, flag in _RECORDING.items():
        if field in given and mode is Mode.OFF:
            raise ValueError(
                f"{flag} does nothing in mode off, which observes nothing and runs no exit; "
                "leave it out, or choose another --mode"
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


def add_execution(parser: argparse.ArgumentParser) -> None:
    """Add the options; all are fields of :class:`EngineOptions`."""
    group = parser.add_argument_group("execution")
    add = option_adder(group, EngineOptions())
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
        "--engine-build-minutes",
        "minutes of an hour in which engines may be built on the GPU beside serving, for stages "
        "that control brought into use, for tensorrt; batches take longer meanwhile; 0: none, such "
        "stages run as chains of segments",
        metavar="MINUTES",
        type=number(0.0),
    )
    add("--streams", "batches that run at the same time, of whatever models", **_COUNT)
    add(
        "--workers",
        "processes that run the stages, each a stream; one that dies is replaced, and what it ran "
        "goes on in another; 0: stages run in the server itself, which is faster. On the CPU only",
        metavar="N",
        type=integer(0),
    )
    group.add_argument(
        "--cluster",
        metavar="FILE|ray",
        type=Path,
        default=argparse.SUPPRESS,
        help="cluster.toml whose [[workers]] run the stages instead: processes on this host, "
        "eeworker on others, actors of Ray, each a stream; ray alone: workers of one CPU each, "
        "wherever Ray has room, as many as it has CPUs free, or --workers N",
    )
    group.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="head of the cluster for --cluster ray (default: RAY_ADDRESS, or the cluster that "
        "this host is of)",
    )
    add(
        "--threads",
        "threads of each stream, for onnxruntime (default: the cores, shared among the streams)",
        **_COUNT,
    )
    add = option_adder(group.add_mutually_exclusive_group(), EngineOptions())
    add(
        "--parallel-below",
        "a new batch starts beside running ones once each has fewer samples than this (PAME's "
        "tau_b); not given: on any idle stream",
        **_COUNT,
    )
    add(
        "--max-violations",
        "instead, let that number follow from the share of late samples that is tolerated "
        "(PAME's tau_l), above 0 and below 1",
        **_SHARE,
    )


POLICY_GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "exits are taken by those who are sure enough, and by nobody else": {
        "run-through": "a batch runs through, and shrinks as samples leave (PAME)",
        "refill": "who is left waits at an exit until the batch is full again (E3)",
        "rebatch": "the same, but only where it costs less than it saves (DREX)",
        "clockwork": "the largest batch of which even the slowest is in time",
        "delay": "size and delay alone, as in Triton; deadlines order the queue",
    },
    "depth too follows from the time that is left: exits may be forced": {
        "slackfit": "as deep as slack and queue allow, while that keeps up (after SuperServe)",
        "slackfit-bare": "the rule as published, to compare with; may fall behind for good",
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
    add = option_adder(group, ModelOptions())
    add("--policy", "one of those below", metavar="NAME", type=policy, dest="scheduling")
    add(
        "--slo-ms",
        "deadline of requests that bring none (default: none)",
        metavar="MS",
        type=number(0.0, above=True),
    )
    add("--max-batch-size", "most samples that run together; larger requests are split", **_COUNT)
    add(
        "--max-queue-delay-ms",
        "longest wait for batch mates while a stream idles; of run-through, refill, rebatch, delay",
        metavar="MS",
        type=number(0.0),
    )
    add("--max-queue-samples", "most samples that wait; more are refused", **_COUNT)
    group.add_argument(
        "--no-padding",
        dest="padding",
        action="store_false",
        default=argparse.SUPPRESS,
        help="let only samples of equal length share a batch (default: those of nearly the same "
        "are padded, where the compiler found that no answer changes by more than rounding)",
    )
    group.add_argument(
        "--forbid-forced-exits",
        dest="forced_exits",
        action="store_false",
        default=argparse.SUPPRESS,
        help="never make a sample leave at an exit that it is not sure enough at, however short "
        "its time: the promise of agreement then holds for every answer",
    )
    add(
        "--share-weights",
        "whether the model and its variants run on one copy of their weights in memory, which "
        "takes longer: always, never, or, auto, variants of which compiling measured that it takes "
        f"at most {MOST_MORE_TIME:.0%} longer".replace("%", "%%"),
        choices=SHARE_WEIGHTS,
    )
    parser.add_argument_group("policies", "\n".join(_describe_policies()))


def _describe_policies() -> Iterator[str]:
    for heading, names in POLICY_GROUPS.items():
        yield from (f"{heading}:", *_describe(names))
