"""The variants of a bundle (SuperServe's subnets): which of them serve, and why others do not.

A variant runs a batch from its first stage to its own answer, so it needs a policy that chooses
among operating points, and streams that hold the whole variant. If variants do not serve, the
server logs the reason and the remedy at its start.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from offramp.bundle import Bundle, Profile
from offramp.engine.models.options import ModelOptions
from offramp.engine.scheduling.policies import chooses_points
from offramp.engine.stages.plan import Mode

_log = logging.getLogger(__name__)

_CHOOSING = "slackfit, max-batch, max-accuracy, cheapest or fixed:EXIT@VARIANT"


def variants_to_serve(
    bundle: Bundle, mode: Mode, options: ModelOptions, *, is_split: bool
) -> tuple[Bundle, ...]:
    """Return one bundle for each variant that may serve, starting with number 1.

    ``is_split`` is whether a plan splits the model among workers. Logs why none serves.
    """
    if not bundle.manifest.variants:
        return ()
    reason = why_no_variants(mode, options, is_split=is_split)
    if reason:
        # The user chose mode off, splits or another policy; a user of slackfit expects variants.
        expected = mode is Mode.OFF or not (is_split or chooses_points(options.scheduling))
        log_not_served(bundle, reason, level=logging.INFO if expected else logging.WARNING)
        return ()
    return bundle.variants()[1:]


def variants_may_serve(mode: Mode, options: ModelOptions) -> bool:
    """Return whether a mode and a policy may serve variants, of a model that is not split."""
    return not why_no_variants(mode, options, is_split=False)


def why_no_variants(mode: Mode, options: ModelOptions, *, is_split: bool) -> str:
    """Return why variants may not serve, with the remedy; empty if they may."""
    if mode is Mode.OFF:
        return "mode off serves the unmodified model; use --mode audit, release or leave"
    if is_split:
        # E3 merges batches at each split to keep their size (3.2), under policies that start every
        # batch with the full model; and a worker holds only the segments of its split.
        return (
            f"a plan splits the model among workers, and policy {options.scheduling}, which merges "
            "batches where splits meet, never chooses a variant; use --workers N instead of "
            f"--cluster, so that each worker holds the whole model, and --policy {_CHOOSING}"
        )
    if not options.forced_exits:
        return (
            "their answers are mostly outside of the promise, and forced exits are forbidden; "
            "remove --forbid-forced-exits"
        )
    if not chooses_points(options.scheduling):
        return f"policy {options.scheduling} serves the full model; use --policy {_CHOOSING}"
    return ""


def log_not_served(bundle: Bundle, reason: str, *, level: int = logging.WARNING) -> None:
    """Log in one line that the variants of a bundle do not serve, and why."""
    names = ", ".join(variant.name for variant in bundle.manifest.variants)
    _log.log(level, "%s: variants %s do not serve: %s", bundle.manifest.name, names, reason)


def log_dominated(bundle: Bundle, chosen: Collection[int]) -> None:
    """Log which variants have no operating point: those whose numbers are not ``chosen``."""
    dominated = [v.name for v in bundle.manifest.variants if v.index not in chosen]
    if dominated:
        _log.info(
            "%s: variants %s are never chosen: other operating points are at least as fast here "
            "and agree at least as often",
            bundle.manifest.name,
            ", ".join(dominated),
        )


def mode_of_variants(mode: Mode) -> Mode:
    """Return the mode of variants' batches, if the full model runs in ``mode``.

    In release mode, too, samples leave after a variant's answer, as in audit mode. A variant is
    chosen when there is no time for the full model, and running the full model after it would take
    that time. A variant's answers are no evidence about the observed exits; audits compare a share
    of the answers.
    """
    return Mode.AUDIT if mode is Mode.RELEASE else mode


def as_fast_as(here: Profile, compiled: Profile, of_variant: Profile) -> Profile:
    """Return a variant's profile, scaled like the full model's from ``compiled`` to ``here``."""
    factors = np.array(here.source_ms) / np.interp(
        here.batch_sizes, compiled.batch_sizes, compiled.source_ms
    )
    factor = float(np.median(factors))

    def scaled(rows: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple((factor * np.array(row)).tolist()) for row in rows)

    return replace(
        of_variant,
        source_ms=scaled([of_variant.source_ms])[0],
        segments_ms=scaled(of_variant.segments_ms),
        exits_ms=scaled(of_variant.exits_ms),
        stages_ms=scaled(of_variant.stages_ms),
    )
