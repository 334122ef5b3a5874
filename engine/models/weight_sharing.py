"""Decides which models of a bundle share one copy of their weights in memory.

Sharing saves memory and costs time, so the operator decides (``--share-weights``). By default,
weights are shared only where this costs little time. The full model keeps packed weights, because
its answers are the reference for variants. A variant shares weights if this made it at most
:data:`MOST_MORE_TIME` slower when the bundle was compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from offramp.bundle import Manifest, Profile
from offramp.bundle.graph_weights import WEIGHTS
from offramp.engine.backends.factory import CPU
from offramp.engine.graphs.external_weights import WeightForm
from offramp.engine.stages.backend_protocol import Backend
from offramp.engine.stages.plan import StageSpec

_log = logging.getLogger(__name__)

MOST_MORE_TIME: Final = 0.1
"""Largest additional time that sharing may cost by default, as a share of the variant's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSharing:
    """The form of the weights of each of a bundle's models in memory."""

    forms: tuple[WeightForm, ...]
    """Form of the weights by variant; 0 is the full model."""
    audits: WeightForm
    """Form of the full model's weights when it runs after a variant, for the audit of a few
    samples."""
    time_ratios: Mapping[int, float]
    """Measured time with shared weights over time with packed weights, by sharing variant."""

    def of(self, spec: StageSpec) -> StageSpec:
        """Return a stage with the form of weights that applies to it."""
        bundle = spec.bundle
        if bundle is None:
            return spec
        form = self.forms[bundle.number]
        if bundle.number and spec.first_segment >= bundle.manifest.source_begins:
            form = self.audits
        return replace(spec, weight_form=form)

    def slowed(self, profile: Profile, variant: int) -> Profile:
        """Convert a variant's profile, measured with packed weights, to its form of weights."""
        ratio = self.time_ratios.get(variant, 1.0)
        if ratio == 1:
            return profile
        return replace(
            profile,
            source_ms=_scaled(profile.source_ms, ratio),
            segments_ms=tuple(_scaled(row, ratio) for row in profile.segments_ms),
            exits_ms=tuple(_scaled(row, ratio) for row in profile.exits_ms),
        )

    def describe(self, manifest: Manifest) -> str:
        """Return a line about the models that share, and the measured costs and savings."""
        names = ["the full model", *(variant.name for variant in manifest.variants)]
        costs = {cost.variant: cost for cost in manifest.weight_sharing}
        shared = [n for n, form in enumerate(self.forms) if form is WeightForm.SHARED]
        if not shared:
            return "each model has its own weights in memory"
        told = []
        for number in shared:
            cost = costs.get(number)
            known = f" ({cost.describe()})" if cost else " (not measured)"
            told.append(names[number] + known)
        return f"one copy of weights in memory for {'; '.join(told)}"


def share_weights(
    manifest: Manifest, asked: str, backend: Backend, *, served: int
) -> WeightSharing:
    """Decide for the full model and the first ``served`` variants, and log the decision.

    ``asked`` is one of :data:`.models.options.SHARE_WEIGHTS`. Sharing requires a backend that maps
    weights, and a bundle that has them in a file.
    """
    costs = {cost.variant: cost for cost in manifest.weight_sharing}
    packed, shared = WeightForm.PACKED, WeightForm.SHARED
    lacking = _lacking(manifest, backend)
    if asked == "always" and lacking:
        _log.warning("%s: '--share-weights always' has no effect: %s", manifest.name, lacking)
    if asked == "never" or lacking:
        forms, audits = [packed] * (1 + served), packed
    elif asked == "always":
        forms, audits = [shared] * (1 + served), shared
    else:
        cheap = {n for n, cost in costs.items() if cost.time_ratio <= 1 + MOST_MORE_TIME}
        forms = [packed, *(shared if n in cheap else packed for n in range(1, 1 + served))]
        audits = shared
    ratios = {
        number: costs[number].time_ratio
        for number, form in enumerate(forms)
        if form is shared and number in costs
    }
    sharing = WeightSharing(forms=tuple(forms), audits=audits, time_ratios=ratios)
    if served or asked == "always":
        _log.info("%s: %s", manifest.name, sharing.describe(manifest))
    return sharing


def _lacking(manifest: Manifest, backend: Backend) -> str:
    """Return why no weights can be shared; empty if they can."""
    if backend.name != CPU:
        return f"backend {backend.name} cannot map weights; serve with --backend onnxruntime"
    if WEIGHTS not in {entry.path for entry in manifest.files}:
        return f"the bundle has no {WEIGHTS}: all of its weights are small"
    return ""


def _scaled(row: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(factor * ms for ms in row)
