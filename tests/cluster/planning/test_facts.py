"""Facts of a bundle for planning: its sizes, the exits in use, and the shares after them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.unit.bundle.cascades import cascade_manifest

from offramp.bundle import NEVER, ActiveExit, Bundle, Manifest
from offramp.cluster.planning.cluster import ModelFacts
from offramp.cluster.planning.facts import exits_in_use, facts_of, recorded_shares

BUNDLE = Bundle.open(Path(__file__).parents[2] / "golden" / "bundle")
"""With exits 0 to 4 after segments 0, 3, 6, 8, 10; of these exit 2 is not in use."""


def sized(manifest: Manifest) -> Manifest:
    """Each segment has a hundred bytes more than the one before; 10 bytes a row cross."""
    last = len(manifest.segments) - 1
    segments = tuple(
        replace(s, row_bytes=10 if s.index < last else 0, weight_bytes=100 * (s.index + 1))
        for s in manifest.segments
    )
    return replace(manifest, segments=segments)


def test_facts_are_those_of_the_exits_that_are_named() -> None:
    bundle = replace(BUNDLE, manifest=sized(BUNDLE.manifest))
    assert facts_of(bundle, exits=(1, 4), going_on=(0.75, 0.25)) == ModelFacts(
        segments=13,
        exit_after=(3, 10),
        going_on=(0.75, 0.25),
        row_bytes=(10,) * 12,
        weight_bytes=tuple(range(100, 1400, 100)),
        exits=(1, 4),
    )


def test_the_last_segment_of_a_cascade_restarts_from_the_input() -> None:
    bundle = replace(BUNDLE, manifest=sized(cascade_manifest()))
    facts = facts_of(bundle, exits=(1,), going_on=(0.5,))
    assert (facts.begins, facts.segments, facts.exit_after) == (2, 3, (1,))
    assert (facts.row_bytes, facts.weight_bytes) == ((10, 10), (100, 200, 300))


def test_exits_that_never_answer_are_not_in_use() -> None:
    first, second, *_ = BUNDLE.policy.active
    never = ActiveExit(exit=second.exit, threshold=NEVER)
    policy = replace(BUNDLE.policy, active=(first, never))
    assert exits_in_use(policy) == (first.exit,)
    assert list(recorded_shares(replace(BUNDLE, policy=policy))) == [first.exit]
    assert exits_in_use(replace(policy, active=())) == ()
    assert recorded_shares(replace(BUNDLE, policy=replace(policy, active=()))) == {}


def test_shares_are_those_of_the_certify_split_by_exit() -> None:
    records = BUNDLE.records()
    chosen = records["split"] == 2
    staying = np.ones(int(chosen.sum()), np.bool_)
    shares = recorded_shares(BUNDLE)
    assert list(shares) == [0, 1, 3, 4]
    for active in BUNDLE.policy.active:
        staying &= records["confidence"][active.exit][chosen] < np.float32(active.threshold)
        assert shares[active.exit] == pytest.approx(staying.mean())
