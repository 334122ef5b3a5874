"""Plans as JSON: there and back, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.facts import Told, facts

from offramp.cluster.planning.cluster_plan import (
    ClusterPlan,
    PlanError,
    PlannedSplit,
    Replicas,
    dump_plan,
    parse_plan,
)


def split(first: int, last: int, count: int, share: float = 1.0) -> PlannedSplit:
    return PlannedSplit(
        first_segment=first,
        last_segment=last,
        replicas=(
            Replicas(device_type="gpu", count=count, exits=(0,), stage_s=2e-3, longest_s=3e-3),
        ),
        share=share,
        period_s=share * 2e-3 / count,
        fill_s=1e-3,
        link_period_s=1e-5,
        link_s=1e-4,
    )


PLAN = ClusterPlan(batch_size=1, splits=(split(0, 2, 4), split(3, 3, 1, 0.5)), cost_per_hour=5.0)


def test_a_plan_survives_a_json_round_trip() -> None:
    assert parse_plan(dump_plan(PLAN)) == PLAN
    predicted = json.loads(dump_plan(PLAN))["predicted"]
    assert predicted["period_s"] == PLAN.period_s == 1e-3
    assert predicted["rate_rps"] == pytest.approx(1000.0)
    assert predicted["latency_s"] == pytest.approx(2 * (3e-3 + 1e-3 + 1e-4))
    assert PLAN.devices() == {"gpu": 5}


def altered(**changes: Any) -> str:
    document = json.loads(dump_plan(PLAN))
    document["plan"].update(changes)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", ("plan", "JSON")),
        ("[1]", ("plan: schema [1]", "expected 1", "plan again")),
        ('{"schema": 2}', ("plan: schema 2", "expected 1", "plan again")),
        (altered(more=1), ("plan", "unknown fields ['more']", "missing fields []", "plan again")),
        (altered(batch_size=0), ("batch_size", "0", "at least 1", "plan again")),
        (altered(splits=[]), ("no gaps", "plan again")),
        (altered(cost_per_hour="5"), ("type float", "'5'", "plan again")),
        ("[" * 100_000, ("plan", "JSON")),
    ],
)
def test_what_is_no_plan_is_refused_in_a_line(text: str, message: Told) -> None:
    with pytest.raises(PlanError, match=facts(*message)) as caught:
        parse_plan(text)
    assert "\n" not in str(caught.value)


def test_splits_have_to_follow_each_other() -> None:
    with pytest.raises(ValueError, match=r"start at segments \[0, 4\]"):
        ClusterPlan(batch_size=1, splits=(split(0, 2, 4), split(4, 5, 1)), cost_per_hour=5.0)
