"""``python -m benchmarks.e3_plans``: its experiments run, on clusters that can be searched."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks import e3_plans
from benchmarks.clusters import cluster_of

from offramp.cluster.planning.cluster import Cluster
from offramp.cluster.planning.cluster_plan import PlanError
from offramp.cluster.planning.optimiser import check_size


@pytest.mark.parametrize("name", e3_plans.EXPERIMENTS)
def test_every_cluster_can_be_searched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cluster is checked in full size, and planned with two devices of each type."""
    checked = []

    def reduced(counts: dict[str, int], *given: Any, **options: Any) -> Cluster:
        check_size(cluster_of(counts))
        checked.append(counts)
        return cluster_of(dict.fromkeys(counts, 2), *given, **options)

    monkeypatch.setattr(e3_plans, "cluster_of", reduced)
    monkeypatch.setattr(e3_plans, "FIXED_RPS", 300.0)
    rows = e3_plans.EXPERIMENTS[name]()
    assert checked
    assert rows
    assert all(list(row) == list(rows[0]) for row in rows)


def test_larger_clusters_are_refused() -> None:
    with pytest.raises(PlanError, match=r"\[46, 46, 46\] make 14,639,043 combinations"):
        check_size(cluster_of(dict.fromkeys(("V100", "P100", "K80"), 46)))
