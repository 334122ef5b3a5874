"""The transition between plans while rows are served: loads, switch and unloads of workers.

A worker runs one split. If its memory has space for both, it loads its next split while it still
holds the old one, and unloads the old one after its rows have drained. Otherwise it either stops
first, and joins the new plan immediately; or it waits for the switch, and joins late. For each
split of the active plan, some worker continues until the switch; each split of the next plan has a
worker by then. So every row has a worker at every step. E3 leaves all of this to its platform (4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.cluster.planning.cluster_plan import ClusterPlan, PlanError

Segments: TypeAlias = tuple[int, int]
"""First and last segment of a split. A worker loads these segments, and the exits between them, as
a unit."""

_TIE: Final = 0.25
"""Bound on the sum of tie-breaking costs of each kind in an assignment; the cost of a load is 1, so
that ties never change the number of loads."""


class TransitionError(PlanError):
    """The workers cannot change plans while they serve; the message is one line with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A worker, which is one device, with the splits that it has loaded."""

    name: str
    device_type: str
    memory_bytes: float = math.inf
    """Memory of the worker for weights, in bytes."""
    holds: frozenset[Segments] = field(default_factory=frozenset)
    serves: Segments | None = None
    """Split of the active plan that the worker runs; ``None`` if the worker is idle."""
    lost: bool = False
    """``True`` if the next plan must not use this worker: it is too slow, or it is out of service
    and its work waits."""

    def __post_init__(self) -> None:
        if self.serves is not None and self.serves not in self.holds:
            raise ValueError(f"worker {self.name!r} serves {self.serves}, but does not hold it")


class Action(StrEnum):
    """Kinds of steps in a change of plans."""

    STOP = "stop"
    """The router stops sending work of the active plan to the worker; rows that the worker has
    drain."""
    UNLOAD = "unload"
    LOAD = "load"
    SWITCH = "switch"
    """New rows are routed by the next plan; rows in progress drain by the old one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionStep:
    """A step of a transition. Each worker takes its steps in order.

    Before a worker unloads a split, the rows of this split have drained.
    """

    action: Action
    worker: str = ""
    """Name of the worker; empty for the switch, which concerns all workers."""
    segments: Segments = (0, 0)
    """Split that is loaded, unloaded or stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTransition:
    """The steps from a plan to the next, in an order in which they may be taken one by one.

    Steps of different workers before the switch may be taken in parallel, and so may those after
    it.
    """

    steps: tuple[TransitionStep, ...]
    roles: tuple[tuple[str, Segments], ...]
    """Split of the next plan for each worker; workers of one split are adjacent."""


def plan_transition(
    old: ClusterPlan | None,
    new: ClusterPlan,
    workers: Sequence[WorkerState],
    *,
    weight_bytes: Sequence[float] = (),
) -> PlanTransition:
    """Plan the steps with the fewest loads from ``old``, which the workers serve, to ``new``.

    Args:
        old: The active plan; ``None`` if there is none.
        new: The next plan.
        workers: All workers, including idle ones.
        weight_bytes: [segments] bytes of the weights of each segment; empty means 0.

    Raises:
        TransitionError: With the fewest loads there are too few workers, or too little memory while
            they serve; solutions with more loads are not searched.
        ValueError: The workers do not serve ``old``.
    """
    moving = _Moving(old, new, workers, weight_bytes)
    roles = moving.assign_roles()
    late = moving.choose_late(roles)
    return moving.transition(roles, late)


class _Moving:
    """State of one call of :func:`plan_transition`."""

    def __init__(
        self,
        old: ClusterPlan | None,
        new: ClusterPlan,
        workers: Sequence[WorkerState],
        weight_bytes: Sequence[float],
    ) -> None:
        self._workers = {worker.name: worker for worker in workers}
        if len(self._workers) < len(workers):
            raise ValueError(f"workers {[w.name for w in workers]}: expected unique names")
        self._sums = np.concatenate([[0.0], np.cumsum(np.asarray(weight_bytes, np.float64))])
        self._serving = _serving(old, workers)
        self._slots = list(_slots(new))

    def bytes_of(self, segments: Segments) -> float:
        """Return the bytes of a split's weights."""
        if len(self._sums) == 1:
            return 0.0
        return float(self._sums[segments[1] + 1] - self._sums[segments[0]])

    def is_tight(self, worker: WorkerState, segments: Segments) -> bool:
        """Return whether a worker's memory cannot hold a split in addition to its current split."""
        if segments in worker.holds or worker.serves is None:
            return False
        both = self.bytes_of(segments) + self.bytes_of(worker.serves)
        return both > worker.memory_bytes

    def assign_roles(self) -> dict[str, Segments]:
        """Assign a worker to each replica of the next plan, with the fewest loads.

        Among assignments with equal loads, it prefers few workers that lack memory, then few bytes
        to load.
        """
        workers = list(self._workers.values())
        found = assign(self._load_costs(workers))
        if found is None:
            raise TransitionError(self._too_few(workers))
        return {
            workers[column].name: segments
            for column, (segments, _) in zip(found, self._slots, strict=True)
        }

    def _load_costs(self, workers: Sequence[WorkerState]) -> NDArray[np.float64]:
        """Return costs, [slots, workers]: 0 if the split is held, else 1 plus a tie-breaker."""
        total = sum(self.bytes_of(segments) for segments, _ in self._slots) or 1.0
        each = _TIE / max(len(self._slots), 1)
        costs = np.full((len(self._slots), len(workers)), math.inf)
        for row, (segments, device_type) in enumerate(self._slots):
            size = self.bytes_of(segments)
            for column, worker in enumerate(workers):
                if worker.lost or worker.device_type != device_type or size > worker.memory_bytes:
                    continue
                tie = each * self.is_tight(worker, segments) + _TIE * size / total
                costs[row, column] = 0.0 if segments in worker.holds else 1.0 + tie
        return costs

    def choose_late(self, roles: Mapping[str, Segments]) -> frozenset[str]:
        """Choose the workers that load after the switch, so that each active split is served.

        A split whose workers all lack memory keeps one of them until the switch, chosen such that
        each split of the next plan has a worker by then.
        """
        replicas = [segments for segments, _ in self._slots]
        # Of the workers of each next split, all but one may join late.
        places = [(s, k) for s in dict.fromkeys(replicas) for k in range(1, replicas.count(s))]
        stuck: list[dict[Segments, str]] = []
        for serving in self._serving.values():
            names = [name for name in serving if not self._workers[name].lost]
            tight = {
                roles[name]: name
                for name in names
                if name in roles and self.is_tight(self._workers[name], roles[name])
            }
            if tight and all(
                name in roles and self.is_tight(self._workers[name], roles[name]) for name in names
            ):
                stuck.append(tight)
        costs = np.full((len(stuck), len(places)), math.inf)
        for row, by_role in enumerate(stuck):
            costs[row] = [0.0 if segments in by_role else math.inf for segments, _ in places]
        found = assign(costs)
        if found is None:
            raise TransitionError(
                f"{len(stuck)} splits of the active plan only have workers that lack memory for "
                "another split; not every split can keep a worker until the next plan is served; "
                "add workers, or stop serving to change plans"
            )
        return frozenset(
            by_role[places[column][0]] for by_role, column in zip(stuck, found, strict=True)
        )

    def transition(self, roles: Mapping[str, Segments], late: frozenset[str]) -> PlanTransition:
        """Return the steps of the change, in the order in which they run."""
        before: list[TransitionStep] = []
        after: list[TransitionStep] = []
        for name, worker in self._workers.items():
            if worker.lost:
                continue
            role = roles.get(name)
            held = set(worker.holds)
            if role is not None and role not in held and name not in late:
                if stopped := self.is_tight(worker, role):
                    assert worker.serves is not None
                    before.append(_step(Action.STOP, name, worker.serves))
                before += self._load(worker, role, held, stopped=stopped)
            spare = sorted(held - {role})
            after += [_step(Action.UNLOAD, name, segments) for segments in spare]
            if name in late and role is not None:
                after.append(_step(Action.LOAD, name, role))
        return PlanTransition(
            steps=(*before, TransitionStep(action=Action.SWITCH), *after),
            roles=tuple(sorted(roles.items(), key=lambda role: (role[1], role[0]))),
        )

    def _load(
        self, worker: WorkerState, role: Segments, held: set[Segments], *, stopped: bool
    ) -> Iterator[TransitionStep]:
        """Load a split before the switch, after unloading the splits that take its memory."""
        running = set() if stopped or worker.serves is None else {worker.serves}
        size = self.bytes_of(role)
        for segments in sorted(held - running):
            if stopped and segments == worker.serves:
                pass  # drained: it is unloaded in either case
            elif sum(map(self.bytes_of, held)) + size <= worker.memory_bytes:
                continue
            held.discard(segments)
            yield _step(Action.UNLOAD, worker.name, segments)
        held.add(role)
        yield _step(Action.LOAD, worker.name, role)

    def _too_few(self, workers: Sequence[WorkerState]) -> str:
        wanted: dict[str, int] = {}
        for _, device_type in self._slots:
            wanted[device_type] = wanted.get(device_type, 0) + 1
        for device_type, count in wanted.items():
            there = sum(w.device_type == device_type and not w.lost for w in workers)
            if there < count:
                return (
                    f"the plan needs {count} workers of type {device_type!r:.40}, and there are "
                    f"{there}; plan for the present workers"
                )
        return (
            "the plan has splits that too few workers have the memory for; set  "
            "memory_gib of the cluster file to the workers' memory, and plan again"
        )


def _step(action: Action, worker: str, segments: Segments) -> TransitionStep:
    return TransitionStep(action=action, worker=worker, segments=segments)


def splits_of(plan: ClusterPlan) -> tuple[Segments, ...]:
    """Return the splits of a plan, in order."""
    return tuple((split.first_segment, split.last_segment) for split in plan.splits)


def _slots(plan: ClusterPlan) -> Iterator[tuple[Segments, str]]:
    """Yield each replica of a plan: its split, and its device type."""
    for segments, split in zip(splits_of(plan), plan.splits, strict=True):
        for replicas in split.replicas:
            yield from [(segments, replicas.device_type)] * replicas.count


def _serving(
    old: ClusterPlan | None, workers: Sequence[WorkerState]
) -> dict[Segments, tuple[str, ...]]:
    """Return the workers of each split of a plan; ValueError if workers and plan do not match."""
    splits = () if old is None else splits_of(old)
    serving = {
        segments: tuple(worker.name for worker in workers if worker.serves == segments)
        for segments in splits
    }
    strangers = {w.serves for w in workers if w.serves is not None} - set(splits)
    idle = [segments for segments, names in serving.items() if not names]
    if strangers or idle:
        raise ValueError(
            f"the workers serve splits {sorted(strangers)}, which are not in the active plan, and "
            f"no worker serves the plan's splits {idle}; expected workers for {list(splits)}, and "
            "for no other splits"
        )
    return serving


def assign(costs: NDArray[np.float64]) -> tuple[int, ...] | None:
    """Assign each row a different column, with the lowest sum of ``costs`` [rows, columns] ≥ 0.

    Returns the column of each row. A cost of infinity excludes a pair; ``None`` if no assignment is
    left. The Hungarian method by shortest augmenting paths (Jonker and Volgenant), O(rows² ·
    columns); implemented here because scipy is not a dependency. 64 workers take a few
    milliseconds.
    """
    rows, columns = costs.shape
    if rows > columns:
        return None
    row_of = np.full(columns + 1, -1)  # the last column is the row to assign
    row_price, column_price = np.zeros(rows), np.zeros(columns)
    for row in range(rows):
        row_of[columns] = row
        came_from = np.full(columns, columns)
        least, used = np.full(columns, math.inf), np.zeros(columns, np.bool_)
        column = columns
        while row_of[column] >= 0:
            if column < columns:
                used[column] = True
            here = row_of[column]
            reduced = costs[here] - row_price[here] - column_price
            better = ~used & (reduced < least)
            least[better], came_from[better] = reduced[better], column
            open_ = np.where(used, math.inf, least)
            nearest = int(np.argmin(open_))
            step = float(open_[nearest])
            if math.isinf(step):
                return None
            row_price[row] += step
            row_price[row_of[:columns][used]] += step
            column_price[used] -= step
            least[~used] -= step
            column = nearest
        while column != columns:  # shift each row of the path to its next column
            before = int(came_from[column])
            row_of[column] = row_of[before]
            column = before
    found = [-1] * rows
    for column, row in enumerate(row_of[:columns].tolist()):
        if row >= 0:
            found[row] = column
    return tuple(found)
