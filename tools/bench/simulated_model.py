"""Models on virtual time: exits of recorded samples, and durations of stages from a profile."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.bundle.records import CERTIFY
from offramp.certify import leaves
from offramp.engine.models.deployment import points_of, with_variants
from offramp.engine.models.options import ModelOptions
from offramp.engine.models.variants import mode_of_variants, variants_may_serve
from offramp.engine.scheduling import OperatingPoints
from offramp.engine.stages.plan import Mode, make_plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Behaviour:
    """Exits and answers of recorded samples, if each sample runs alone."""

    exits: tuple[int | None, ...]
    """[stages]: exit of each stage; ``MODEL_END`` for the last, ``None`` if it gives no answer."""
    leaves_at: NDArray[np.int64]
    """[records]: first stage whose confidence reaches its threshold."""
    agrees: NDArray[np.bool_]
    """[stages, records]: true if the stage's answer is the source model's; undefined for stages
    without an answer."""
    right: NDArray[np.bool_] | None = None
    """[stages, records]: true if the stage's answer is the label; ``None`` without labels."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedVariant:
    """A smaller variant of a model: exits of its samples, and its durations."""

    behaviour: Behaviour
    """Behaviour of its samples; ``agrees`` compares with the full model."""
    seconds: Sequence[Sequence[float]]
    """[stages][max_batch_size + 1]: durations of its stages in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedModel:
    """A model on virtual time: its behaviour, its operating points, and its durations."""

    behaviour: Behaviour
    points: OperatingPoints
    """Operating points from which the policy chooses."""
    seconds: tuple[tuple[float, ...], ...]
    """[stages][max_batch_size + 1]: durations of stages in seconds."""
    smaller: tuple[SimulatedVariant, ...] = ()
    """Variants 1, 2 … of the model, if policy and mode serve them."""


def model_of(
    bundle: Bundle,
    mode: Mode,
    options: ModelOptions,
    *,
    stage_overhead_s: float = 0.0,
    slowdown: float = 1.0,
    borders: Collection[int] = (),
) -> SimulatedModel:
    """Return a simulated bundle from its profile and records of unseen data (certify split).

    Variants are simulated if the mode and the policy of ``options`` serve them.
    ``stage_overhead_s`` is the time of each stage in addition to its graph; the scheduler knows it.
    ``slowdown`` multiplies the times; the scheduler does not know it. If the model is split among
    devices, stages also end after the segments of ``borders``.
    """
    full, *smaller = (
        _variant_of(
            shown,
            mode_of_variants(mode) if shown.number else mode,
            options,
            stage_overhead_s,
            borders,
        )
        for shown in (bundle.variants() if variants_may_serve(mode, options) else (bundle,))
    )
    points = with_variants(full[1], [points for _, points in smaller])
    return SimulatedModel(
        behaviour=full[0],
        points=points,
        seconds=_slowed(full[1], slowdown),
        smaller=tuple(
            SimulatedVariant(behaviour=behaviour, seconds=_slowed(points, slowdown))
            for behaviour, points in smaller
        ),
    )


def _variant_of(
    shown: Bundle,
    mode: Mode,
    options: ModelOptions,
    overhead_s: float,
    borders: Collection[int],
) -> tuple[Behaviour, OperatingPoints]:
    """Return the simulation of one of a bundle's variants, from its own profile and records."""
    plan = make_plan(shown, mode=mode, borders=() if shown.number else borders)
    records = shown.records()
    chosen = records["split"] == CERTIFY
    final = records["final_prediction"][chosen]
    leaves_at = np.full(len(final), len(plan.stages) - 1)
    said = np.tile(final, (len(plan.stages), 1))
    for stage in reversed(plan.stages):
        if stage.answer is not None and not stage.final:
            confidence = records["confidence"][stage.answered_by][chosen]
            sure = leaves(confidence, np.float32(stage.threshold))
            leaves_at[sure] = stage.index
            said[stage.index] = records["prediction"][stage.answered_by][chosen]
    behaviour = Behaviour(
        exits=tuple(stage.exit for stage in plan.stages),
        leaves_at=leaves_at,
        agrees=said == final,
        right=said == records["label"][chosen] if "label" in records else None,
    )
    return behaviour, points_of(shown.profile(), records, plan, options, overhead_s=overhead_s)


def _slowed(points: OperatingPoints, slowdown: float) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(slowdown * s for s in row) for row in points.latencies.profiled_s)
