"""Facts of a bundle for planning: sizes of segments, exits in use, share of rows after each exit.

This module needs neither onnx nor the compiler, so that ``eecompile plan`` and servers plan with
the same facts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offramp.bundle import NEVER, Bundle, ExitPolicy
from offramp.bundle.schema.parts import PartSizes
from offramp.cluster.planning.cluster import ModelFacts
from offramp.engine.scheduling import going_on


def exits_in_use(policy: ExitPolicy) -> tuple[int, ...]:
    """Return the exits at which rows may leave, by index in the bundle, in depth order."""
    return tuple(active.exit for active in policy.active if active.threshold < NEVER)


def recorded_shares(bundle: Bundle) -> dict[int, float]:
    """Return, by exit in use, the share of all rows that continues after this exit.

    Shares are in depth order. They are computed from the bundle's records of the certify split,
    with the thresholds of its policy. A row that leaves at one exit does not reach the next.
    """
    active = [a for a in bundle.policy.active if a.threshold < NEVER]
    placed = [(stage, a.exit, a.threshold) for stage, a in enumerate(active)]
    each = going_on(placed, bundle.records(), len(active) + 1)
    shares = np.cumprod(each[: len(active)]).tolist()
    return dict(zip(exits_in_use(bundle.policy), shares, strict=True))


def facts_of(bundle: Bundle, *, exits: Sequence[int], going_on: Sequence[float]) -> ModelFacts:
    """Return the facts of a bundle for planning.

    Args:
        bundle: Only its manifest is read.
        exits: [exits] the exits in use, by index in the bundle, in depth order.
        going_on: [exits] share of all rows that continues after each exit: recorded or forecast,
            never rising.
    """
    manifest = bundle.manifest
    sizes = PartSizes.kept_by(manifest.segments)
    return ModelFacts(
        segments=len(manifest.segments),
        exit_after=tuple(manifest.exits[exit_].after_segment for exit_ in exits),
        going_on=tuple(going_on),
        row_bytes=sizes.row_bytes,
        weight_bytes=sizes.weight_bytes,
        exits=tuple(exits),
        begins=manifest.source_begins,
    )
