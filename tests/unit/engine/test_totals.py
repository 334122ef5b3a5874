"""Counts over the versions of a model: nothing that only grows falls when one is replaced."""

from __future__ import annotations

from dataclasses import replace

from offramp.certify.decision import NEVER
from offramp.engine.requests.statistics import (
    CountersSnapshot,
    Histogram,
    ModelStatistics,
    StageStatistics,
    VariantStatistics,
)
from offramp.engine.serving.totals import add_counts, totals_of


def histogram(*counts: int) -> Histogram:
    return Histogram(bounds=(1.0, 2.0), counts=counts, total=float(sum(counts)))


def stage(label: str, answered: int, threshold: float) -> StageStatistics:
    times = histogram(answered, 0, 1)
    return StageStatistics(
        label=label,
        threshold=threshold,
        answered=answered,
        forced=1,
        batch_size=times,
        run_s=times,
    )


def variant(name: str, answered: int, agreement: float) -> VariantStatistics:
    return VariantStatistics(
        name=name, answered=answered, forced=1, audited=2, disagreed=1, agreement=agreement
    )


EARLIER = CountersSnapshot(
    stages=(stage("exit 1", 3, 0.5), stage("exit 4", 5, 0.6), stage("final", 7, 0.0)),
    requests=15,
    samples=20,
    answered=15,
    failed={"cancelled": 2, "expired": 1},
    retried=1,
    queued=1,
    in_flight=1,
    resumed=2,
    auditing=3,
    lost_feedback=4,
    out_of_range=5,
    discounted=6,
    unseen_lengths=7,
    padded=8,
    padded_positions=9,
    variants=(variant("half", 4, 0.9), variant("third", 1, 0.8)),
    queue_s=histogram(1, 2, 3),
    latency_s=histogram(4, 5, 6),
)
NOW = ModelStatistics(
    mode="leave",
    backend="fake",
    policy_version=1,
    scheduling="run-through",
    streams=1,
    streams_in_service=1,
    restarts=0,
    parallel_below=None,
    uptime_s=1.0,
    version=2,
    earlier=EARLIER,
    stages=(stage("exit 4", 50, 0.7), stage("final", 70, 0.0)),
    requests=100,
    samples=200,
    answered=120,
    failed={"expired": 10, "rejected": 3},
    retried=10,
    queued=10,
    in_flight=10,
    resumed=20,
    auditing=30,
    lost_feedback=40,
    out_of_range=50,
    discounted=60,
    unseen_lengths=70,
    padded=80,
    padded_positions=90,
    variants=(variant("half", 40, 0.95),),
    queue_s=histogram(10, 20, 30),
    latency_s=histogram(40, 50, 60),
)


def test_counts_of_versions_are_added() -> None:
    total = totals_of(NOW)
    assert [(s.label, s.answered, s.forced, s.threshold) for s in total.stages] == [
        ("exit 1", 3, 1, NEVER),
        ("exit 4", 55, 2, 0.7),
        ("final", 77, 2, 0.0),
    ]
    assert total.stages[1].run_s == histogram(55, 0, 2)
    assert total.stages[0].batch_size == histogram(3, 0, 1)
    assert total.failed == {"cancelled": 2, "expired": 11, "rejected": 3}
    assert (total.queue_s, total.latency_s) == (histogram(11, 22, 33), histogram(44, 55, 66))
    assert total.variants == (
        variant("third", 1, 0.8),
        replace(variant("half", 44, 0.95), forced=2, audited=4, disagreed=2),
    )
    for name in (
        *("requests", "samples", "answered", "retried", "queued", "in_flight", "resumed"),
        *("auditing", "lost_feedback", "out_of_range", "discounted", "unseen_lengths"),
        *("padded", "padded_positions"),
    ):
        assert getattr(total, name) == getattr(EARLIER, name) + getattr(NOW, name), name


def test_the_first_version_has_no_other_counts() -> None:
    first = replace(NOW, earlier=None)
    assert totals_of(first) is first
    assert add_counts(EARLIER, first).requests == 115
