"""``eebench simulate --plan``: a bundle on the devices of a plan, end to end; what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.facts import Told, tells

from offramp.bundle import Bundle
from offramp.cluster.command.plan_command import PlanOptions, plan_bundle
from offramp.cluster.planning.cluster_plan import ClusterPlan, PlannedSplit, Replicas, dump_plan
from offramp.engine.stages.plan import Mode
from offramp.tools.bench import cli
from offramp.tools.bench.planned_devices import placed, read_splits, slowed

BUNDLE = Path(__file__).parents[2] / "golden" / "bundle"
CLUSTER = """
[devices.fast]
count = 3
cost_per_hour = 3.0
speed = 2.0

[devices.slow]
count = 2
cost_per_hour = 1.0
speed = 1.0

[link]
gbit_per_s = 10
latency_ms = 0.01
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def plan_of(*splits: tuple[int, int, Mapping[str, int]], size: int = 4) -> ClusterPlan:
    return ClusterPlan(
        batch_size=size,
        splits=tuple(
            PlannedSplit(
                first_segment=first,
                last_segment=last,
                replicas=tuple(
                    Replicas(device_type=kind, count=count, exits=(), stage_s=1e-3, longest_s=1e-3)
                    for kind, count in devices.items()
                ),
                share=1.0,
                period_s=1e-3,
                fill_s=0.0,
                link_period_s=0.0,
                link_s=0.0,
            )
            for first, last, devices in splits
        ),
        cost_per_hour=1.0,
    )


@pytest.fixture
def segments() -> int:
    return len(Bundle.open(BUNDLE).manifest.segments)


def written(plan: ClusterPlan, folder: Path) -> Path:
    path = folder / "plan.json"
    path.write_text(dump_plan(plan))
    return path


def simulated(folder: Path, *arguments: str) -> dict[str, Any]:
    out = folder / "found.json"
    load = ("--rate", "400", "--duration-s", "0.3", "--json", str(out))
    assert cli.main(["simulate", str(BUNDLE), *arguments, *load]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert (
        cli.main(["simulate", str(BUNDLE), *arguments, "--rate", "100", "--duration-s", "0.1"]) == 1
    )
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_eecompile_plans_is_simulated_beside_the_source_model(
    tmp_path: Path, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "planned.json"
    result = plan_bundle(PlanOptions(bundle=BUNDLE, cluster=cluster, json=plan)).result
    found = simulated(tmp_path, "--plan", str(plan), "--cluster", str(cluster))
    assert [run["policy"] for run in found["runs"]] == ["refill", "source:clockwork"]
    for run in found["runs"]:
        assert run["summary"]["requests"] > 50
        assert not any(run["summary"]["failures"].values())
    assert found["simulated"]
    assert found["environment"]["workers"] == 5
    assert found["environment"]["plan"] == str(plan)
    assert "5 device(s) by" in " ".join(capsys.readouterr().out.split())
    assert result.plan.devices().keys() <= {"fast", "slow"}


def test_splits_are_placed_by_the_plan_and_the_source_model_on_all(
    tmp_path: Path, cluster: Path, segments: int
) -> None:
    bundle = Bundle.open(BUNDLE)
    plan = plan_of((0, 0, {"slow": 1}), (1, segments - 1, {"fast": 2}))
    splits = read_splits(bundle, written(plan, tmp_path), cluster, 8)
    where = placed(splits, bundle, Mode.LEAVE, splits.batch_size(8), 1e-4)
    assert splits.batch_size(8) == 4
    assert [s.kind for s in where.streams] == ["fast", "fast", "fast", "slow", "slow"]
    spans = [sorted(s.prefers) for s in where.streams]
    assert spans[:3] == [[*range(1, where.stages)]] * 2 + [[]], "the third is spare"
    assert spans[3:] == [[0], []]
    assert all(len(s.holds) == where.stages for s in where.streams)
    slow, fast = (where.kind_of(stream).seconds for stream in (3, 0))
    np.testing.assert_allclose(np.array(slow)[:, 1:] - 1e-4, 2 * (np.array(fast)[:, 1:] - 1e-4))
    source = placed(splits, bundle, Mode.OFF, 8, 0.0)
    assert (source.stages, len(source.streams)) == (1, 5)
    whole_s = np.array(bundle.profile().source_ms) / 1e3
    sizes = [n for n in bundle.profile().batch_sizes if n <= 8]
    np.testing.assert_allclose(
        np.array(source.kind_of(3).seconds[0])[sizes], whole_s[: len(sizes)], rtol=0.25
    )
    later = slowed(where, 3.0)
    own = np.array(later.kind_of(0).own_s(fast))
    np.testing.assert_allclose(own, 3 * np.array(fast))


@pytest.mark.parametrize(
    ("splits", "arguments", "message"),
    [
        ([(0, 0, {"slow": 1}), (1, -1, {"fast": 1})], ["--policy", "run-through"],
         ("run-through", "merges")),
        ([(0, 0, {"slow": 1}), (1, 99, {"fast": 1})], [], ("segments 0 to 99", "expected 0 to")),
        ([(0, -1, {"fast": 4})], [], ("4 devices of type 'fast'",)),
        ([(0, -1, {"gpu": 1})], [], ("1 devices of type 'gpu'",)),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_a_line(
    splits: Sequence[tuple[int, int, Mapping[str, int]]],
    arguments: Sequence[str],
    message: Told,
    tmp_path: Path,
    cluster: Path,
    segments: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = [(first, segments - 1 if last < 0 else last, kinds) for first, last, kinds in splits]
    plan = written(plan_of(*whole), tmp_path)
    line = refused(capsys, "--plan", str(plan), "--cluster", str(cluster), *arguments)
    tells(line, *message)


def test_a_plan_of_another_schema_is_refused(
    tmp_path: Path, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no.json").write_text("{}")
    arguments = ("--plan", str(tmp_path / "no.json"), "--cluster", str(cluster))
    tells(refused(capsys, *arguments), "no.json", "schema None", "expected 1", "plan again")
