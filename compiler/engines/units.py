"""Units: what of a bundle becomes one engine each."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple, TypeAlias, get_args

from offramp.bundle import Bundle, Manifest
from offramp.bundle.engine_index import unit_name
from offramp.engine.plan import Mode, make_plan

Part: TypeAlias = Literal["source", "stages", "segments"]
"""Kinds of units: the unmodified model; the stages of the bundle's policy; every segment."""
PARTS: tuple[Part, ...] = get_args(Part)


class Unit(NamedTuple):
    """Segments fused to one engine, with the exit after the last of them or without.

    Units sort by where they begin. All segments without an exit are the source model, whose
    graph is the bundle's source file.
    """

    first_segment: int
    last_segment: int
    exit: int | None
    """Index into ``Manifest.exits``; ``None`` where no exit is fused in."""

    @property
    def name(self) -> str:
        """``00-12``, or ``00-03-exit1`` with an exit."""
        return unit_name(*self)


def units_of(bundle: Bundle, parts: Collection[Part] = PARTS) -> tuple[Unit, ...]:
    """List the units of a bundle, each once, in this order: source, stages, segments."""
    found: list[Unit] = []
    if "source" in parts:
        found.append(source_unit(bundle.manifest))
    if "stages" in parts:
        found += stage_units(bundle)
    if "segments" in parts:
        found += segment_units(bundle.manifest)
    return _unique(found)


def source_unit(manifest: Manifest) -> Unit:
    """The unmodified model."""
    return Unit(0, len(manifest.segments) - 1, None)


def stage_units(bundle: Bundle) -> tuple[Unit, ...]:
    """Stages of the policy in the modes that serve.

    They differ where an exit is switched off (NEVER): a mode that observes still asks it.
    """
    plans = (make_plan(bundle, mode=mode) for mode in (Mode.LEAVE, Mode.AUDIT))
    stages = (stage for plan in plans for stage in plan.stages)
    return _unique(Unit(s.first_segment, s.last_segment, s.exit) for s in stages)


def segment_units(manifest: Manifest) -> tuple[Unit, ...]:
    """Every segment by itself, with its exit where there is one.

    Chained they serve any policy until its stages are built.
    """
    exits = {exit_.after_segment: exit_.index for exit_ in manifest.exits}
    return tuple(Unit(s.index, s.index, exits.get(s.index)) for s in manifest.segments)


def _unique(units: Iterable[Unit]) -> tuple[Unit, ...]:
    return tuple(dict.fromkeys(units))
