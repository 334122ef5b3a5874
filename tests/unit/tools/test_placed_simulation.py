"""The simulator under placements: whose seconds count, what moving rows takes, who is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from tests.facts import facts
from tests.unit.scheduling.helpers import row_set

from offramp.certify.decision import MODEL_END
from offramp.engine.scheduling import (
    DeviceKind,
    DeviceLink,
    Latencies,
    OperatingPoint,
    OperatingPoints,
    Placement,
    Run,
    StreamPlacement,
)
from offramp.engine.scheduling.decisions import Piece
from offramp.engine.scheduling.policies import PolicyName, make_scheduler
from offramp.tools.bench.common.outcomes import Status
from offramp.tools.bench.simulated_devices import SimulatedDevices
from offramp.tools.bench.simulated_model import Behaviour
from offramp.tools.bench.simulation import (
    SimulatedLoad,
    SimulatedOutcomes,
    draw_load,
    simulate,
)

SECONDS = [[0.0, 1.0, 1.5], [0.0, 2.0, 3.0], [0.0, 0.5, 0.75]]
"""Times of three stages, for batches of one and of two."""
BEHAVIOUR = Behaviour(
    exits=(5, None, MODEL_END),
    leaves_at=np.array([0, 2]),
    agrees=np.array([[True, False], [False, False], [True, True]]),
)
"""Record 0 leaves at exit 5, record 1 runs to the end; the stage between ends without an exit."""
FAST, SLOW = DeviceKind(name="fast"), DeviceKind(name="slow", speed=2.0)
LINK = DeviceLink(bytes_per_s=400.0, latency_s=0.5)


def on(prefers: Sequence[int], holds: Sequence[int] = (), kind: str = "fast") -> StreamPlacement:
    mine = frozenset(prefers)
    return StreamPlacement(kind=kind, prefers=mine, holds=mine | frozenset(holds))


def placement(*streams: StreamPlacement, **others: Any) -> Placement:
    return Placement(stages=3, streams=streams, **{"kinds": (FAST, SLOW), **others})


def run(
    load: SimulatedLoad,
    where: Placement | None,
    policy: str = "refill",
    *,
    streams: int | None = None,
    slower: Mapping[int, float] | None = None,
    really: Placement | None = None,
    losing_s: Sequence[float] = (),
) -> SimulatedOutcomes:
    points = OperatingPoints(
        points=(
            OperatingPoint(deepest=0, exit=5, agreement=0.5),
            OperatingPoint(deepest=2, exit=MODEL_END, agreement=1.0),
        ),
        latencies=Latencies(SECONDS, [0.5, 1.0, 1.0]),
    )
    count = streams or len(where.streams if where else ())
    scheduler = make_scheduler(
        PolicyName.parse(policy),
        points,
        max_batch_size=2,
        max_queue=10_000,
        streams=count,
        placement=where,
    )
    return simulate(
        BEHAVIOUR,
        scheduler,
        SECONDS,
        load,
        streams=count,
        placement=really or where,
        slower=slower,
        losing_s=losing_s,
    )


def load(*requests: tuple[float, int], slo_s: float = float("inf")) -> SimulatedLoad:
    arrivals, records = zip(*requests, strict=True)
    return SimulatedLoad(
        arrivals_s=np.array(arrivals), records=np.array(records), slo_s=slo_s, duration_s=20.0
    )


def random_load(seed: int, rate: float, *, slo_s: float = float("inf")) -> SimulatedLoad:
    gaps_s = np.random.default_rng(seed).exponential(1 / rate, 150)
    arrivals_s = np.cumsum(gaps_s)
    return draw_load(arrivals_s, float(arrivals_s[-1]) + 1.0, 2, slo_s=slo_s, seed=seed)


def test_nobody_leaves_where_a_stage_gives_no_answer() -> None:
    found = run(load((0.0, 0), (10.0, 1)), placement(on([0, 1, 2], kind="slow")))
    np.testing.assert_allclose(found.latency_s, [2.0, 7.0])
    assert found.exit.tolist() == [5, MODEL_END]
    assert found.agrees.tolist() == [1, 1]


def test_rows_take_their_time_to_the_stream_that_merges_them() -> None:
    """Stage 0 until 1.0; 0.5 s + 100 B / 400 B/s to stream 1, which runs stages 1 and 2 until
    4.25; stage 0 of the second is done at 4.0, and it is moved from 4.25 on."""
    where = placement(on([0]), on([1, 2]), row_bytes=(0.0, 100.0, 0.0), link=LINK)
    found = run(load((0.0, 1), (3.0, 1)), where)
    np.testing.assert_allclose(found.latency_s, [4.25, 4.5])


def test_what_is_not_moved_costs_no_time() -> None:
    """Both are merged by the stream that buffered them."""
    where = placement(on([0, 1, 2]), row_bytes=(0.0, 100.0, 100.0), link=LINK)
    found = run(load((0.0, 1), (0.0, 1)), where)
    free = run(load((0.0, 1), (0.0, 1)), placement(on([0, 1, 2])))
    np.testing.assert_array_equal(found.latency_s, free.latency_s)
    assert found.answered.all()


def test_rows_of_a_kind_come_together_and_kinds_one_after_the_other() -> None:
    """From the two fast ones 3 rows of 100 B, from the other slow one 1; its own are there."""
    links = (("slow", "slow", DeviceLink(bytes_per_s=100.0)),)
    streams = on([0]), on([0]), on([1, 2], kind="slow"), on([0], kind="slow")
    where = placement(*streams, row_bytes=(0.0, 100.0, 0.0), link=LINK, links=links)
    devices = SimulatedDevices([[[0.0, *[1.0] * 6]] * 3], 4, where)
    for number, stream in ((7, 0), (8, 1), (9, 2), (10, 3)):
        devices.keep(number, stream)
    pieces = [Piece(7, np.arange(2)), Piece(8, np.arange(1)), Piece(9, np.arange(2))]
    merged = a_run(1, [*pieces, Piece(10, np.arange(1))])
    assert devices.takes_s(2, merged) == 2.0 + (0.5 + 3 * 100 / 400) + 100 / 100
    assert devices.takes_s(2, a_run(1, pieces[2:])) == 2.0
    assert devices.takes_s(2, a_run(1, [])) == 2.0, "it goes on where it is"
    devices.forget([7, 8])
    with pytest.raises(KeyError):
        devices.takes_s(2, merged)


def a_run(stage: int, pieces: Sequence[Piece]) -> Run:
    count = sum(len(piece.positions) for piece in pieces) or 1
    return Run(1, stage, row_set([0] * count, deadlines_s=0.0), 2, tuple(pieces))


def test_a_stream_that_is_denied_is_asked_again_once_another_is_busy() -> None:
    """Stream 1, asked first, may steal only when stream 0 has taken the first of the two."""
    where = placement(on([0]), on([1, 2], [0]))
    found = run(load((0.0, 0), (0.0, 0), (0.5, 0)), where)
    np.testing.assert_allclose(found.latency_s, [1.0, 1.0, 1.5])


def test_a_straggler_takes_longer_than_its_kind() -> None:
    where = placement(on([0, 1, 2]), on([0, 1, 2], kind="slow"))
    found = run(load((0.0, 0), (0.0, 0)), where, slower={1: 3.0})
    np.testing.assert_allclose(sorted(found.latency_s), [1.0, 6.0])
    alike = run(load((0.0, 0), (0.0, 0)), None, streams=2, slower={0: 4.0})
    np.testing.assert_allclose(sorted(alike.latency_s), [1.0, 4.0])


def test_what_stages_really_take_may_differ_from_what_the_scheduler_expects() -> None:
    where = placement(on([0, 1, 2]), on([0, 1, 2], kind="slow"))
    really = placement(
        *where.streams, kinds=(FAST, DeviceKind(name="slow", seconds=tuple(map(tuple, SECONDS))))
    )
    found = run(load((0.0, 0), (0.0, 0)), where, really=really)
    np.testing.assert_allclose(found.latency_s, [1.0, 1.0])


@pytest.mark.parametrize("policy", ["run-through", "refill", "rebatch", "slackfit", "delay"])
@pytest.mark.parametrize("slo_s", [float("inf"), 9.0])
def test_a_placement_in_form_only_changes_nothing(policy: str, slo_s: float) -> None:
    """One kind, whose own table is the model's: asked stream by stream, decided as ever."""
    own = DeviceKind(name="own", seconds=tuple(map(tuple, SECONDS)))
    where = placement(*[on([0, 1, 2], kind="own")] * 3, kinds=(own,))
    assert not where.is_shared
    requests = random_load(1, 1.6, slo_s=slo_s)
    found, plain = run(requests, where, policy), run(requests, None, policy, streams=3)
    np.testing.assert_array_equal(found.latency_s, plain.latency_s)
    np.testing.assert_array_equal(found.status, plain.status)
    np.testing.assert_array_equal(found.batch_size, plain.batch_size)
    assert np.count_nonzero(found.answered) > 50


@pytest.mark.parametrize("policy", ["refill", "rebatch"])
@pytest.mark.parametrize("seed", range(8))
def test_under_any_placement_every_request_ends_once(policy: str, seed: int) -> None:
    where = draw_placement(seed)
    patient = run(random_load(seed, 2.0), where, policy)
    assert patient.answered.all(), "without deadlines all are answered"
    expected = np.where(random_load(seed, 2.0).records == 0, 5, MODEL_END)
    np.testing.assert_array_equal(patient.exit, expected)
    hurried = run(random_load(seed, 4.0, slo_s=8.0), where, policy, slower={0: 3.0})
    assert set(hurried.status.tolist()) <= {Status.OK, Status.EXPIRED, Status.REJECTED}
    np.testing.assert_array_equal(np.isnan(hurried.latency_s), ~hurried.answered)
    again = run(random_load(seed, 4.0, slo_s=8.0), where, policy, slower={0: 3.0})
    np.testing.assert_array_equal(hurried.latency_s, again.latency_s)


@pytest.mark.parametrize("seed", range(6))
def test_a_lost_stream_takes_nothing_with_it_where_others_hold_its_stages(seed: int) -> None:
    drawn = draw_placement(seed)
    everything = on([], [0, 1, 2])
    where = placement(everything, *drawn.streams, row_bytes=drawn.row_bytes, link=drawn.link)
    assert run(random_load(seed, 1.0), where, losing_s=[20.0]).answered.all()


def draw_placement(seed: int) -> Placement:
    """Splits in depth order with some streams each, of two kinds, which hold other stages too."""
    random = np.random.default_rng(seed)
    cuts = sorted(random.choice([1, 2], random.integers(0, 3), replace=False).tolist())
    streams = []
    for first, end in zip([0, *cuts], [*cuts, 3], strict=True):
        for _ in range(random.integers(1, 4)):
            held = np.flatnonzero(random.random(3) < 0.5).tolist()
            kind = str(random.choice(["fast", "slow"]))
            streams.append(on(range(first, end), held, kind))
    return placement(*streams, row_bytes=(0.0, 100.0, 40.0), link=LINK)


def test_streams_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=facts("1 streams", "expected 2", "place each")):
        SimulatedDevices([SECONDS], 2, placement(on([0, 1, 2])))
    with pytest.raises(ValueError, match=facts("streams are [2]", "below 2")):
        SimulatedDevices([SECONDS], 2, slower={1: 2.0, 2: 2.0})
