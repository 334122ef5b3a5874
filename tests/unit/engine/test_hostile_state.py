"""The server starts with any state file: with all of it, or as if there were none."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.facts import tells
from tests.unit.certify.population import Population, feed, policy_of, synthetic, synthetic_costs

from offramp.baselines.apparate import ApparateController
from offramp.engine.common.control_state import load_state, save_state
from offramp.engine.common.state_file import StateFile
from offramp.engine.control.adjustment import ExitProposals
from offramp.engine.control.certified import CertifiedController
from offramp.engine.control.controller import Controller
from offramp.engine.control.shift import ShiftGuard
from offramp.engine.models.served_model import ModelControl
from offramp.engine.requests.recorder import Recorder
from offramp.engine.serving.control_loop import ControlLoop
from offramp.engine.serving.executor import Executor

COSTS = synthetic_costs()
PROMISED = policy_of({0: 0.99, 1: 0.98, 2: 0.98}, version=4, promised=0.01)


def deep(levels: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(levels):
        nested = [nested]
    return nested


VALUES: tuple[Any, ...] = (
    math.inf,
    -math.inf,
    math.nan,
    1e308,
    5e-324,
    -1,
    0,
    10**400,
    2**53 + 1,
    True,
    None,
    "1",
    "Infinity",
    [],
    [1, 2],
    {},
    {"": None},
    deep(50),
    np.zeros(0),
    np.array(3.0),
    np.full((3, 2), math.nan),
    np.array(["1", "2"]),
    np.array([2**63, 1], np.uint64),
    np.zeros((1, 1), np.complex128),
)


@pytest.fixture(scope="module")
def population() -> Population:
    return synthetic(0, size=20_000)


@pytest.fixture(scope="module")
def fresh(population: Population) -> CertifiedController:
    """Return the controller as served, before any sample."""
    records = population.records(np.random.default_rng(0), tune=2_000, certify=10)
    guard, proposals = ShiftGuard(records["confidence"]), ExitProposals(COSTS, max_overhead=0.1)
    return CertifiedController(PROMISED, COSTS, records, guard=guard, proposals=proposals)


@pytest.fixture(scope="module")
def kept(population: Population, fresh: CertifiedController) -> dict[str, Any]:
    """Return the state kept after samples, a tuning and an alarm."""
    controller = copy.deepcopy(fresh)
    feed(controller, population, 6_000, rng=np.random.default_rng(1))
    controller.invalidate("a test")
    feed(controller, population, 3_000, rng=np.random.default_rng(2))
    return dict(controller.state())


def start(controller: Controller, path: Path) -> None:
    """Start and stop a control loop that reads no samples."""
    control = ModelControl(
        controller=controller,
        recorder=Recorder(1),
        state_file=StateFile(path),
        fingerprint={},
        deployments=cast(Any, SimpleNamespace(cancel=lambda: None)),
    )
    model = cast(Any, SimpleNamespace(options=None, control=control))
    loop = ControlLoop(cast(Executor, None), {"m": model}, period_s=3600.0)
    loop.start()
    loop.status("m")
    loop.stop()


def places(state: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places in a state but its root, outer ones first."""
    if where:
        yield where
    if isinstance(state, dict | list):
        for key in state if isinstance(state, dict) else range(len(state)):
            yield from places(state[key], (*where, key))


def changed(state: Any, where: tuple[Any, ...], value: Any) -> Any:
    """The state with another value at a place."""
    changed_state = copy.deepcopy(state)
    inner = changed_state
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    return changed_state


def starts(
    state: dict[str, Any],
    fresh: Controller,
    population: Population,
    path: Path,
    caplog: pytest.LogCaptureFixture,
) -> bool:
    """Start with a state in the file, and serve; says whether it was restored.

    If not there is a warning, and the controller is as if there had been no file.
    """
    caplog.clear()
    controller = copy.deepcopy(fresh)
    assert save_state(path, state, fingerprint={})
    start(controller, path)
    refused = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert all(len(record.getMessage()) < 500 for record in refused)
    if refused:
        (record,) = refused
        assert "starting afresh" in record.getMessage()
        assert same(controller.state(), fresh.state())
        return False
    with np.errstate(all="raise", under="ignore"):
        feed(controller, population, 256, rng=np.random.default_rng(0), chunk=128)
    assert save_state(path, dict(controller.state() or {}), fingerprint={})
    return True


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    return bool(one == other)


def test_a_state_that_is_sound_is_restored(
    kept: dict[str, Any],
    fresh: CertifiedController,
    population: Population,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert starts(kept, fresh, population, tmp_path / "m.state.npz", caplog)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("guard", "wait"), math.inf),
        (("guard", "wait"), "1024"),
        (("guard", "since"), 10**400),
        (("version",), 10**400),
        (("counters", "alarms"), math.inf),
        (("counters", "observed"), True),
        (("level",), math.nan),
        (("paths",), 0),
        (("calibrated",), "no"),
        (("curves",), np.full((3, 2), math.inf)),
        (("drift",), None),
        (("path", "samples"), math.inf),
        (("path", "effort"), math.inf),
        (("path", "bound"), 0.9),
        (("path", "exits"), np.array([0, 0, 1])),
        (("path", "exits"), np.array([-1, 0, 1])),
        (("path", "alpha"), 0.0),
        (("path", "wealth", "log"), deep(50)),
        (("bound", "alpha"), math.nan),
        (("guard",), []),
        (("guard", "recent"), np.zeros((2, 600))),
        (("guard", "recent"), np.full((3, 600), math.nan)),
        (("guard", "excess"), np.ones(2)),
        (("suspicion",), None),
    ],
)
def test_a_state_that_is_not_is_left_alone(
    where: tuple[str, ...],
    value: Any,
    kept: dict[str, Any],
    fresh: CertifiedController,
    population: Population,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = changed(kept, where, value)
    assert not starts(state, fresh, population, tmp_path / "m.state.npz", caplog)


def test_a_state_deeper_than_python_reads_is_left_alone(
    fresh: CertifiedController, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, nested = tmp_path / "m.state.npz", "[" * 100_000 + "]" * 100_000
    document = f'{{"schema_version": 2, "fingerprint": {{}}, "state": {{"path": {nested}}}}}'
    np.savez(path, document=np.array(document.encode()))
    controller = copy.deepcopy(fresh)
    start(controller, path)
    assert "RecursionError" in caplog.text
    assert same(controller.state(), fresh.state())


class Halfway(ApparateController):
    """Restores a part, and then finds out that the rest does not fit."""

    def restore(self, state: Mapping[str, Any]) -> None:
        self._counters.observed = 7
        raise OverflowError("int too large to convert to float")


def test_a_state_that_is_refused_halfway_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, controller = tmp_path / "m.state.npz", Halfway(PROMISED, COSTS)
    save_state(path, {"version": 9}, fingerprint={})
    start(controller, path)
    tells(caplog.text, "unusable", "OverflowError")
    assert controller.status().observed == 0
    kept = load_state(path, fingerprint={})
    assert kept is not None
    assert kept["version"] == controller.policy.version


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_change_of_a_state_stops_a_start(
    seed: int,
    kept: dict[str, Any],
    fresh: CertifiedController,
    population: Population,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every place with every value in turn, then several at random, and single numbers."""
    rng = np.random.default_rng(seed)
    path = tmp_path / "m.state.npz"
    cases = [(where, value) for where in places(kept) for value in VALUES]
    states = [changed(kept, where, value) for where, value in cases[seed::4]]
    states += [_mutant(kept, rng) for _ in range(500)]
    restored = [starts(state, fresh, population, path, caplog) for state in states]
    assert 0 < sum(restored) < len(restored)


def _mutant(kept: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A state with one to three places changed, removed, or a number in an array changed."""
    state = copy.deepcopy(kept)
    for _ in range(int(rng.integers(1, 4))):
        if not (found := list(places(state))):
            break
        where = found[int(rng.integers(len(found)))]
        inner = state
        for key in where[:-1]:
            inner = inner[key]
        value = inner[where[-1]]
        if isinstance(value, np.ndarray) and value.size and rng.random() < 0.7:
            number = float(rng.choice([math.inf, math.nan, -1.0, 0.0, 1e300, 0.5, 1e15]))
            if value.dtype.kind == "f" or math.isfinite(number):
                value.flat[int(rng.integers(value.size))] = min(number, 1e18)
        elif rng.random() < 0.2:
            del inner[where[-1]]
        else:
            inner[where[-1]] = copy.deepcopy(VALUES[int(rng.integers(len(VALUES)))])
    return state
