"""The chaos harness sees what it is there for; and a short run of it."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from offramp.certify.decision import MODEL_END
from tests.chaos.account import (
    Account,
    Disturbance,
    Ending,
    LifeCounts,
    Outcome,
    ServerCounts,
    Trouble,
    differences,
    unexpected,
)
from tests.chaos.events import ALL, GENTLE, Deck, terminate
from tests.chaos.report import Report
from tests.chaos.run import ChaosOptions, run
from tests.chaos.supervisor import Supervisor, parse_counts
from tests.chaos.truth import Truth
from tests.chaos.watch import Beat, Reading, leaks, undisturbed
from tests.small import compile_small


def ending(status: str, *, kind: str = "unary", by_server: bool = True) -> Ending:
    return Ending(kind=kind, status=status, by_server=by_server, began_s=10.0, ended_s=11.0)


def test_every_request_has_one_outcome() -> None:
    account = Account()
    tickets = [account.send("unary", 0.0) for _ in range(5)]
    account.answered(tickets[0], 3)
    account.cancelled(tickets[1], 2)
    for ticket, status in zip(tickets[2:4], ("RESOURCE_EXHAUSTED", "INTERNAL"), strict=True):
        account.ended_with(ticket, status=status, by_server=True, now_s=1.0, samples=1)
    assert [account.total(outcome) for outcome in Outcome] == [1, 1, 1, 1]
    assert account.difference == 1
    assert account.life == LifeCounts(answered=3, doubtful=4)
    assert account.faults == []


def test_a_second_outcome_is_a_fault_and_counts_nothing() -> None:
    account = Account()
    ticket = account.send("stream", 0.0)
    account.answered(ticket, 1)
    account.answered(ticket, 1)
    assert account.faults == [
        "a request of kind 'stream' was answered (OK) after it had been answered"
    ]
    assert account.difference == 0
    assert account.life.answered == 1


@pytest.mark.parametrize("status", ["CANCELLED", "UNKNOWN", "INTERNAL", "UNAVAILABLE"])
def test_a_status_without_a_reason_is_unexpected(status: str) -> None:
    assert len(unexpected([ending(status)], [])) == 1


@pytest.mark.parametrize(
    ("status", "trouble", "excused"),
    [
        ("UNAVAILABLE", Trouble.LEAVING, True),
        ("UNAVAILABLE", Trouble.ABSENT, True),
        ("UNAVAILABLE", Trouble.DISK, False),
        ("INTERNAL", Trouble.BACKEND, True),
        ("INTERNAL", Trouble.LEAVING, False),
        ("CANCELLED", Trouble.LEAVING, False),
        ("UNKNOWN", Trouble.ABSENT, False),
        ("DEADLINE_EXCEEDED", Trouble.STOPPED, True),
    ],
)
def test_trouble_excuses_what_it_causes_and_only_meanwhile(
    status: str, trouble: Trouble, excused: bool
) -> None:
    during = Disturbance(trouble=trouble, began_s=10.5, ended_s=10.6)
    before = Disturbance(trouble=trouble, began_s=8.0, ended_s=9.9)
    assert unexpected([ending(status)], [during]) == ([] if excused else [ending(status)])
    assert unexpected([ending(status)], [before]) == [ending(status)]


def test_a_stream_that_ended_before_it_was_used_has_the_reason_of_its_end() -> None:
    account = Account()
    ticket = account.send("triton stream", 20.0)
    account.ended_with(ticket, status="UNAVAILABLE", by_server=False, now_s=10.0, samples=0)
    at_its_end = Disturbance(trouble=Trouble.ABSENT, began_s=9.0, ended_s=11.0)
    later = Disturbance(trouble=Trouble.ABSENT, began_s=12.0, ended_s=21.0)
    assert unexpected(account.endings, [at_its_end]) == []
    assert unexpected(account.endings, [later]) == account.endings


def test_own_faults_and_full_queues_are_expected() -> None:
    assert unexpected([ending("INVALID_ARGUMENT", kind="wrong dtype")], []) == []
    assert unexpected([ending("RESOURCE_EXHAUSTED")], []) == []
    assert len(unexpected([ending("RESOURCE_EXHAUSTED", by_server=False)], [])) == 1
    assert len(unexpected([ending("INVALID_ARGUMENT")], [])) == 1


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ((10, 8, 2, 0), []),
        ((11, 8, 2, 0), ["accepted 11"]),
        ((11, 8, 2, 1), ["holds 1"]),
        ((9, 7, 2, 0), ["clients have 8"]),
        ((13, 11, 2, 0), ["clients have 8"]),
    ],
)
def test_the_servers_account_and_the_clients_agree(
    server: tuple[int, int, int, int], told: list[str]
) -> None:
    names = ("accepted", "answered", "failed", "held")
    counts = ServerCounts(**dict(zip(names, server, strict=True)))
    found = list(differences(counts, LifeCounts(answered=8, doubtful=2)))
    assert len(found) == len(told)
    assert all(part in line for part, line in zip(told, found, strict=True))


def test_what_was_sent_to_the_server_before_may_have_been_answered_by_either() -> None:
    account = Account()
    before = account.send("triton unary", 1.0)
    account.answered(account.send("unary", 1.0), 5)
    account.new_life(2.0)
    account.answered(account.send("unary", 3.0), 8)  # the new one answers before it says ready
    account.answered(before, 2)
    assert account.life == LifeCounts(answered=8, doubtful=2)


def test_a_server_that_does_not_listen_yet_has_computed_nothing(tmp_path: Path) -> None:
    server, account = Supervisor(tmp_path / "m.ee", tmp_path), Account()
    account.listens = server.listens
    server._is_gone()
    account.cancelled(account.send("departing", 0.0), 1)
    with socket.create_server(("127.0.0.1", server.grpc_port)):
        account.cancelled(account.send("departing", 0.0), 2)
    server._is_back()
    account.cancelled(account.send("departing", 0.0), 4)
    assert account.life.doubtful == 6


def test_the_metrics_page_is_read_without_what_was_rejected() -> None:
    page = "\n".join(
        (
            "# TYPE offramp_samples counter",
            'offramp_samples_total{model="m"} 12',
            "# TYPE offramp_answers counter",
            'offramp_answers_total{model="m",exit="exit 0"} 4',
            'offramp_answers_total{model="m",exit="final"} 5',
            "# TYPE offramp_failures counter",
            'offramp_failures_total{model="m",cause="expired"} 2',
            'offramp_failures_total{model="m",cause="rejected"} 70',
            "# TYPE offramp_queued_samples gauge",
            'offramp_queued_samples{model="m"} 1',
            "# TYPE offramp_in_flight_samples gauge",
            'offramp_in_flight_samples{model="m"} 0',
            "",
        )
    )
    assert parse_counts(page) == ServerCounts(accepted=12, answered=9, failed=2, held=1)


def readings(*rss_mib: float, life: int = 0, descriptors: int = 20) -> list[Reading]:
    return [
        Reading(life=life, at_s=float(n), rss_mib=rss, descriptors=descriptors, threads=9)
        for n, rss in enumerate(rss_mib)
    ]


def test_growth_is_a_leak_and_warming_up_is_not() -> None:
    assert list(leaks(readings(100, 190, 200, 203, 202, 204))) == []
    assert len(list(leaks(readings(100, 190, 200, 210, 220, 230)))) == 1
    several = [reading for life in range(6) for reading in readings(100 + 8 * life, life=life)]
    assert len(list(leaks(several))) == 1
    more = [r for number in range(9) for r in readings(100.0, descriptors=20 + 4 * number)]
    assert len(list(leaks(more))) == 1


def test_a_stopped_server_need_not_be_live() -> None:
    beats = [Beat(sent_s=s, took_s=0.5, status="OK") for s in (1.0, 3.0, 6.0)]
    stopped = Disturbance(trouble=Trouble.STOPPED, began_s=3.2, ended_s=5.0)
    slow = Disturbance(trouble=Trouble.DISK, began_s=0.0, ended_s=9.0)
    assert undisturbed(beats, [stopped, slow]) == [beats[0], beats[2]]


def pulse_problems(tmp_path: Path, *beats: Beat, limit_ms: float | None = None) -> list[str]:
    """Return a report's problems of ``ServerLive``; the server was stopped from 10 to 20 s."""
    server = Supervisor(tmp_path / "m.ee", tmp_path)
    server.disturbances.append(Disturbance(trouble=Trouble.STOPPED, began_s=10, ended_s=20))
    report = Report(
        options=SimpleNamespace(live_limit_ms=limit_ms), account=Account(), server=server,
        beats=beats, readings=(), settled=0, rate=0.0, capacity=0.0, withheld=0, events={},
        faults=(), max_disagreement=0.01, pool=1,
    )  # fmt: skip
    return [problem for problem in report.problems() if "ServerLive" in problem]


def test_a_server_that_is_not_live_is_a_problem_unless_it_is_disturbed(tmp_path: Path) -> None:
    live = Beat(sent_s=1.0, took_s=0.01, status="OK")
    dead = Beat(sent_s=2.0, took_s=0.0, status="UNAVAILABLE")
    hanging = Beat(sent_s=3.0, took_s=5.0, status="DEADLINE_EXCEEDED")
    disturbed = Beat(sent_s=11.0, took_s=5.0, status="DEADLINE_EXCEEDED")
    assert pulse_problems(tmp_path, live, disturbed, limit_ms=100.0) == []
    assert pulse_problems(tmp_path, live, dead, hanging, hanging) == [
        "1 times ServerLive ended with UNAVAILABLE while a server ran",
        "2 times ServerLive ended with DEADLINE_EXCEEDED while a server ran",
    ]
    late = pulse_problems(tmp_path, live, hanging, limit_ms=100.0)
    assert late[1] == "1 times ServerLive took more than 100 ms, 5000 ms"


def test_a_server_that_is_never_asked_whether_it_lives_is_a_problem(tmp_path: Path) -> None:
    told = ["ServerLive was never asked while a server ran"]
    disturbed = Beat(sent_s=11.0, took_s=0.01, status="OK")
    assert pulse_problems(tmp_path) == pulse_problems(tmp_path, disturbed) == told


TRUTH = Truth(
    inputs={"x": np.zeros((3, 2))},
    output="logits",
    answers={
        0: np.array([[5.0, 1.0], [1.0, 4.0], [2.0, 6.0]]),
        MODEL_END: np.array([[7.0, 1.0], [9.0, 4.0], [2.0, 8.0]]),
    },
    confidences={
        0: np.array([0.9, 0.8, 0.7], np.float32),
        MODEL_END: np.array([0.99, 0.98, 0.97], np.float32),
    },
    max_disagreement=0.01,
)


def test_an_answer_is_right_at_the_exit_that_it_names() -> None:
    answers = np.array([TRUTH.answers[0][1], TRUTH.answers[MODEL_END][2]])
    assert TRUTH.wrong([1, 2], [0, MODEL_END], answers, [0.8, 0.97]) is None
    assert TRUTH.disagreements([1, 2], answers) == 1


@pytest.mark.parametrize(
    ("rows", "exits", "sure", "told"),
    [
        ([2, 1], [0, MODEL_END], [0.8, 0.97], "input 2 is answered as input 1 is at exit 0"),
        ([1, 2], [MODEL_END, MODEL_END], [0.8, 0.97], "input 1 is answered as input 1 is at exit"),
        ([1, 2], [0, MODEL_END], [0.7, 0.97], "input 1"),
        ([1, 2], [5, MODEL_END], [0.8, 0.97], "there is no exit 5"),
        ([1], [0, MODEL_END], [0.8, 0.97], "1 samples were sent, and there are 2 exits"),
    ],
)
def test_an_answer_to_another_request_is_wrong(
    rows: list[int], exits: list[int], sure: list[float], told: str
) -> None:
    answers = np.array([TRUTH.answers[0][1], TRUTH.answers[MODEL_END][2]])
    found = TRUTH.wrong(rows, exits, answers, sure)
    assert found is not None
    assert told in found


def test_an_answer_of_nobody_is_wrong() -> None:
    found = TRUTH.wrong([0], [0], np.array([[3.0, 3.0]]), [0.9])
    assert found == "input 0 is answered as no input is, at exit 0"


def test_a_server_that_ends_by_itself_and_tracebacks_are_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import sys, time; sys.stderr.write('2026-01-01 00:00:00,000 ERROR   a: b\\n"
        "Traceback (most recent call last):\\nready: gRPC on x\\n'); sys.stderr.flush();"
        "sys.exit(3)"
    )
    start = asyncio.create_subprocess_exec

    async def other(_python: str, *_arguments: str, **how: object) -> asyncio.subprocess.Process:
        return await start(sys.executable, "-c", script, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", other)

    async def scenario() -> Supervisor:
        server = Supervisor(tmp_path / "m.ee", tmp_path)
        await server.start()
        await server.lives[-1].process.wait()
        assert server.died()
        assert not server.died()
        return server

    server = asyncio.run(scenario())
    assert server.faults == ["life 0 ended by itself, with status 3"]
    assert dict(server.tracebacks) == {"ERROR   a: b": 1}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    bundle, inputs = compile_small(tmp_path_factory.mktemp("small"))
    return bundle.path, inputs


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")]
)
def test_a_server_that_is_not_ready_yet_listens_once_its_port_is_open(
    family: socket.AddressFamily, host: str, tmp_path: Path
) -> None:
    server = Supervisor(tmp_path / "m.ee", tmp_path)
    server._is_gone()
    assert not server.listens()
    with socket.create_server((host, server.grpc_port), family=family):
        assert server.listens()
    assert not server.listens()


def test_no_server_is_there_until_the_next_one_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import sys, time; print('ready: gRPC on x', file=sys.stderr); time.sleep(99)"
    start = asyncio.create_subprocess_exec

    async def other(_python: str, *_arguments: str, **how: object) -> asyncio.subprocess.Process:
        return await start(sys.executable, "-c", script, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", other)
    began: list[int] = []

    async def scenario() -> Supervisor:
        server = Supervisor(tmp_path / "m.ee", tmp_path)
        server.starting = lambda: began.append(len(server.lives))
        await server.start()
        assert server.disturbances == []
        await server.leave()
        await server.start()
        await server.kill()
        return server

    server = asyncio.run(scenario())
    assert began == [0, 1]
    leaving, first, second = server.disturbances
    assert (first.trouble, second.trouble) == (Trouble.ABSENT, Trouble.ABSENT)
    assert first.began_s < leaving.ended_s
    assert first.ended_s < second.ended_s == float("inf")


SEED = next(s for s in range(99) if Deck(Random(f"{s}/0")).draw(gentle=False) is terminate)
"""A run that begins with a server that leaves, and another one in its place."""


def test_every_event_comes_before_any_comes_again() -> None:
    deck = Deck(Random(0))
    drawn = [deck.draw(gentle=False) for _ in ALL]
    assert sorted(e.__name__ for e in drawn) == sorted(e.__name__ for e in ALL)
    gentle = [deck.draw(gentle=True) for _ in range(8)]
    assert [gentle.count(event) for event in GENTLE] == [2] * len(GENTLE)


@pytest.fixture
def brief(small: tuple[Path, Path], tmp_path: Path) -> Callable[..., ChaosOptions]:
    """Options of a run of some seconds."""

    def options(**how: object) -> ChaosOptions:
        settings = {
            "minutes": 0.3,
            "seed": SEED,
            "load": 0.5,
            "most_rps": 60.0,
            "every_s": 1.5,
            "settle_s": 5.0,
            "capacity_s": 1.0,
            "one_life": 0.0,
            "least_rests": 2,
            "least_answers": 200,
            **how,
        }
        bundle, inputs = small
        return ChaosOptions(bundle=bundle, inputs=inputs, folder=tmp_path, **settings)  # type: ignore[arg-type]

    return options


@pytest.mark.slow
def test_nothing_is_wrong_and_nothing_lost(brief: Callable[..., ChaosOptions]) -> None:
    report = asyncio.run(run(brief()))
    assert report.problems() == [], "\n".join(report.lines())
    assert report.account.total(Outcome.ANSWERED) >= 200
    assert report.settled >= 2
    assert len(report.server.lives) > 1
    assert len(report.beats) > 50


@pytest.mark.slow
def test_answers_that_are_mixed_up_are_found(
    brief: Callable[..., ChaosOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Truth.of

    def another(
        bundle: object, inputs: dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]]
    ) -> Truth:
        """The truth about inputs that are not those sent: as if answers came one request late."""
        truth = of(bundle, inputs)  # type: ignore[arg-type]
        shifted = {name: np.roll(array, 1, axis=0) for name, array in truth.inputs.items()}
        return Truth(
            **{name: getattr(truth, name) for name in truth.__slots__} | {"inputs": shifted}
        )

    monkeypatch.setattr(Truth, "of", another)
    report = asyncio.run(run(brief(minutes=0.05)))
    assert len(report.account.wrong) >= report.account.statuses["unary", "OK"] > 0
    assert any("wrong answers" in problem for problem in report.problems())
