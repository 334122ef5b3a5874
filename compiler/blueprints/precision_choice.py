"""``eecompile --precision``: a quantised copy in front of the model, if that saves more here.

Exits are trained on the float32 model and put on copies without changes. On the example model they
agree with the float32 model as often as exits that were trained on the copy. So there is one set of
exits, and one blueprint for each precision: the unmodified model, its fastest fully quantised copy,
and a copy that is quantised only where that saves time. The savings of each blueprint are predicted
from measured times.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from offramp.bundle import CpuFeatures
from offramp.calibration.data.dataset import Dataset, DataSplit
from offramp.calibration.precision.choice import PrecisionChoice, choose_kind
from offramp.calibration.precision.kinds import CpuPrecision, Mix, best_mix, quantise
from offramp.calibration.precision.quantised_graphs import PrecisionError
from offramp.calibration.precision.quantization import RANGE_SAMPLES
from offramp.compiler.blueprints.blueprint import Blueprint, draw, own_exit, time_copy
from offramp.compiler.blueprints.cascade import PREFIX, slice_cascade
from offramp.compiler.common.errors import CompileError
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.cuts.slicing import Sliced
from offramp.compiler.exits.exits import BuiltExit, build_on, reads_of
from offramp.compiler.exits.timed_model import CompileRun
from offramp.compiler.graphs.graph import serialised, written_names
from offramp.compiler.graphs.source_model import SourceModel
from offramp.engine.common.environment import cpu_features

_log = logging.getLogger(__name__)

LEAST_AGREEMENT: Final = 0.8
"""The smallest share of answers in which a copy must agree with the float32 model. That model
answers the samples that a copy is not sure of, so a copy may err more often than the bundle; but
exits and thresholds must detect these errors."""
JUDGED_SAMPLES: Final = 512
"""Number of samples of the tune split on which every kind of copy is tried. The chosen kind is then
recorded on all samples."""
LEAST_GAIN: Final = 0.01
"""The smallest share of the source model's time that a copy must be predicted to save in addition
to the savings by exits alone. A second model costs memory, time if no sample exits, and longer
audits, because audits run both models."""


def choose_precision(plain: Blueprint, exits: Sequence[BuiltExit]) -> Blueprint:
    """Return the blueprint that saves the most time here: the model, or a copy in front of it.

    ``plain`` is the float32 model with the ``exits``. ``plain`` is returned if no copy saves more;
    the reason is logged, as a warning if the user asked for a copy.

    Raises:
        CompileError: The user asked for a copy that cannot be cut, or its pieces differ from it.
        DataError: A copy fails on samples.
    """
    run = plain.timed.run
    _say_what_the_cpu_has(cpu_features())
    choice = fastest_kind(plain.sliced.whole_model(), run)
    if choice.kind is None:
        return _without(plain, choice.reason, run.options)
    wholes: dict[CpuPrecision, Blueprint] = {}
    for tried in _tried(choice):
        try:
            wholes[tried] = on_copy(plain, exits, choice.graphs[tried])
        except CompileError as error:
            if run.options.copy.precision == "int8":
                raise
            _log.warning("%s is left out: %s.", tried.value, error)
    if not wholes:
        return _without(plain, f"no copy can be cut ({choice.reason})", run.options)
    kind = max(wholes, key=lambda kind: wholes[kind].predicted_savings)
    described = next(found.describe() for found in choice.measured if found.kind is kind)
    best = _mixed(plain, wholes[kind], exits, replace(choice, kind=kind)) or wholes[kind]
    float32, int8 = plain.predicted_savings, best.predicted_savings
    compared = f"exits alone are predicted to save {float32:.1%} of its time, with int8 {int8:.1%}"
    if int8 < float32 + LEAST_GAIN:
        return _without(plain, f"{compared} ({described})", run.options)
    reason = "; ".join(part for part in (described, best.reason, compared) if part)
    _log.info("Precision int8: %s.", reason)
    return replace(best, reason=reason)


def _tried(choice: PrecisionChoice) -> tuple[CpuPrecision, ...]:
    """Return the kinds to try as blueprints: the fastest, and the one that agrees most often.

    The certificate allows a limited disagreement. The more a copy itself uses up, the less is left
    for the copy's exits.
    """
    fastest, *others = choice.graphs
    return fastest, *others[-1:]


def _without(plain: Blueprint, reason: str, options: CompileOptions) -> Blueprint:
    """Use the model without a copy, and log why: as a warning if a copy was asked for."""
    if options.copy.precision == "int8":
        nothing = "PRECISION int8 BRINGS NOTHING HERE, the bundle will be of fp32: %s."
        _log.warning(nothing, reason)
    else:
        _log.info("Precision fp32: %s.", reason)
    return replace(plain, reason=reason)


def _say_what_the_cpu_has(cpu: CpuFeatures) -> None:
    """Log the CPU's instructions, and whether weights are rounded because int8 sums saturate."""
    _log.info("The int8 copy is made on this CPU: %s.", cpu.describe())
    if cpu.saturates:
        _log.warning(
            "This CPU (%s) has no VNNI and adds int8 products in 16 bits: weights that meet 8-bit "
            "activations are rounded to 7 bits, so that no sum overflows here or elsewhere. The "
            "copy agrees with the float32 model less often than one that is made on a CPU with "
            "VNNI. To compile for CPUs with VNNI, compile on such a CPU.",
            cpu.describe(),
        )


def fastest_kind(model: SourceModel, run: CompileRun) -> PrecisionChoice:
    """Make every kind of int8 copy that the model allows, and choose the fastest on this machine.

    Scales are measured on training samples, and agreement on the tune split.
    """
    parts, options = run.parts, run.options
    samples = max(min(len(parts.tune), JUDGED_SAMPLES), options.choice.reference_batch_size)
    judged = np.arange(samples) % len(parts.tune)
    with run.progress.step("Try kinds of int8", len(CpuPrecision)) as advance:
        choice = choose_kind(
            serialised(model.proto),
            model.answer.output,
            _ranges(parts),
            parts.tune.subset(judged),
            threads=options.threads,
            least_agreement=LEAST_AGREEMENT,
            saturating=cpu_features().saturates is True,
            batch_sizes=sorted({1, options.choice.reference_batch_size}),
            progress=advance,
        )
    for note in choice.disturbed:
        _log.warning(
            "The machine was disturbed while the kinds of int8 copies were timed: %s.", note
        )
    return choice


def _ranges(parts: DataSplit) -> Dataset:
    """Return the samples that scales are measured on."""
    return parts.train.subset(np.arange(min(len(parts.train), RANGE_SAMPLES)))


def on_copy(plain: Blueprint, exits: Sequence[BuiltExit], copy: bytes) -> Blueprint:
    """Put a copy in front of the model, with the model's exits; the copy's answer is the last exit.

    Raises the errors of :func:`choose_precision`.
    """
    run = plain.timed.run
    sliced = slice_cascade(plain.sliced, copy, run.options)
    timed = time_copy(sliced, copy, run)
    return draw(timed, [*_moved(sliced, exits), own_exit(timed, plain)])


def _moved(sliced: Sliced, exits: Sequence[BuiltExit]) -> list[BuiltExit]:
    """Build exits of the source model on its copy, at the cuts that the copy also has."""
    places = {cut.name: index for index, cut in enumerate(sliced.cuts)}
    return [
        replace(
            exit_,
            candidate=place,
            cut=sliced.cuts[place],
            graph=build_on(sliced, place, exit_.best.head, exit_.weights),
            reads=reads_of(sliced.cuts[place], exit_.best.head),
        )
        for exit_ in exits
        if (place := places.get(PREFIX + exit_.cut.name)) is not None
    ]


def _mixed(
    plain: Blueprint, whole: Blueprint, exits: Sequence[BuiltExit], found: PrecisionChoice
) -> Blueprint | None:
    """Put a copy in front of the model, quantised only where that is predicted to save time.

    Returns ``None`` in three cases: quantising saves time everywhere, the copy saves no more than
    ``whole``, the fully quantised copy, or the copies have other cuts than the model.
    """
    names = [PREFIX + cut.name for cut in plain.sliced.cuts]
    if names != [cut.name for cut in whole.sliced.cuts[:-1]]:
        return None
    run = plain.timed.run
    options = run.options
    size = options.choice.reference_batch_size
    mix = best_mix(
        whole.candidates,
        whole.path.active,
        plain.choice.cost(size),
        whole.choice.cost(size),
        max_overhead=options.choice.max_overhead,
    )
    if mix is None or found.kind is None:
        return None
    try:
        copy = quantise(
            serialised(plain.sliced.whole_model().proto),
            _ranges(run.parts),
            found.kind,
            threads=options.threads,
            saturating=found.saturating,
            kept=_outputs_outside(plain.sliced, mix),
            ranges=dict(found.ranges),
        )
    except PrecisionError:  # no operator that remains can be quantised
        return None
    mixed = on_copy(plain, exits, copy)
    better = mixed.predicted_savings > whole.predicted_savings
    _log.info(
        "A copy of %s is predicted to save %.1f %% of the time, or %.1f %% if all of it were int8.",
        mix.describe(len(whole.sliced.cuts)),
        100 * mixed.predicted_savings,
        100 * whole.predicted_savings,
    )
    return replace(mixed, reason=mix.describe(len(whole.sliced.cuts))) if better else None


def _outputs_outside(sliced: Sliced, mix: Mix) -> set[str]:
    """Return the names of all operator outputs in the segments that stay float32."""
    outside = (s.proto.graph for s in sliced.segments if s.index not in mix)
    return set().union(*map(written_names, outside))
