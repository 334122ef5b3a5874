"""Totals over the versions of a model: counters must not fall when one version replaces another."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from offramp.certify.decision import NEVER
from offramp.engine.requests.statistics import (
    CountersSnapshot,
    Histogram,
    ModelStatistics,
    StageStatistics,
    VariantStatistics,
)


def totals_of(statistics: ModelStatistics) -> CountersSnapshot:
    """Return the counts of a served name: of the current and all earlier versions."""
    if statistics.earlier is None:
        return statistics
    return add_counts(statistics.earlier, statistics)


def add_counts(earlier: CountersSnapshot, now: CountersSnapshot) -> CountersSnapshot:
    """Return the sum of the counts of two versions; exits and variants are matched by label.

    Values that are not counts, for instance thresholds, are taken from the later version.
    Departures are left out, because they are counted by sets of exits of one bundle.
    """
    return CountersSnapshot(
        stages=_add_stages(earlier.stages, now.stages),
        requests=earlier.requests + now.requests,
        samples=earlier.samples + now.samples,
        answered=earlier.answered + now.answered,
        failed=dict(Counter(earlier.failed) + Counter(now.failed)),
        failed_requests=earlier.failed_requests + now.failed_requests,
        retried=earlier.retried + now.retried,
        queued=earlier.queued + now.queued,
        in_flight=earlier.in_flight + now.in_flight,
        resumed=earlier.resumed + now.resumed,
        auditing=earlier.auditing + now.auditing,
        lost_feedback=earlier.lost_feedback + now.lost_feedback,
        out_of_range=earlier.out_of_range + now.out_of_range,
        discounted=earlier.discounted + now.discounted,
        unseen_lengths=earlier.unseen_lengths + now.unseen_lengths,
        padded=earlier.padded + now.padded,
        padded_positions=earlier.padded_positions + now.padded_positions,
        variants=_add_variants(earlier.variants, now.variants),
        queue_s=_add_histograms(earlier.queue_s, now.queue_s),
        latency_s=_add_histograms(earlier.latency_s, now.latency_s),
    )


def _add_stages(
    earlier: tuple[StageStatistics, ...], now: tuple[StageStatistics, ...]
) -> tuple[StageStatistics, ...]:
    before = {stage.label: stage for stage in earlier}
    gone = before.keys() - {stage.label for stage in now}
    kept = [replace(stage, threshold=NEVER) for label, stage in before.items() if label in gone]
    return (*kept, *(_add_stage(before.get(stage.label), stage) for stage in now))


def _add_stage(earlier: StageStatistics | None, now: StageStatistics) -> StageStatistics:
    if earlier is None:
        return now
    return replace(
        now,
        answered=earlier.answered + now.answered,
        forced=earlier.forced + now.forced,
        batch_size=_add_histograms(earlier.batch_size, now.batch_size),
        run_s=_add_histograms(earlier.run_s, now.run_s),
    )


def _add_variants(
    earlier: tuple[VariantStatistics, ...], now: tuple[VariantStatistics, ...]
) -> tuple[VariantStatistics, ...]:
    before = {variant.name: variant for variant in earlier}
    gone = before.keys() - {variant.name for variant in now}
    kept = [variant for name, variant in before.items() if name in gone]
    return (*kept, *(_add_variant(before.get(variant.name), variant) for variant in now))


def _add_variant(earlier: VariantStatistics | None, now: VariantStatistics) -> VariantStatistics:
    if earlier is None:
        return now
    return replace(
        now,
        answered=earlier.answered + now.answered,
        forced=earlier.forced + now.forced,
        audited=earlier.audited + now.audited,
        disagreed=earlier.disagreed + now.disagreed,
    )


def _add_histograms(earlier: Histogram, now: Histogram) -> Histogram:
    assert earlier.bounds == now.bounds, "all histograms of a kind have the same buckets"
    counts = tuple(a + b for a, b in zip(earlier.counts, now.counts, strict=True))
    return replace(now, counts=counts, total=earlier.total + now.total)
