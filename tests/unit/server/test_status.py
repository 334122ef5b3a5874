"""The words and figures of the status page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any

import pytest
from tests.unit.server.test_metrics import PLAN

from offramp.bundle import NEVER, TensorSpec
from offramp.cluster.planning.batch_profile import ProfileStatus
from offramp.engine.control.controller import Evidence
from offramp.engine.requests.learning_status import LearningStatus
from offramp.engine.requests.results import ModelInfo
from offramp.engine.requests.statistics import Histogram, ModelStatistics, StageStatistics
from offramp.server.pages.curves import describe_age, short_number
from offramp.server.pages.history import History
from offramp.server.pages.status import describe_duration, render_status, view_agreement, view_model
from offramp.testing.engine import FakeEngine, fake_control, fake_model

PROMISE = fake_model().policy.promise
EMPTY = Histogram(bounds=(1.0,), counts=(0, 0), total=0.0)


def stage(label: str, threshold: float, answered: int, forced: int = 0) -> StageStatistics:
    return StageStatistics(
        label=label, threshold=threshold, answered=answered, forced=forced, batch_size=EMPTY,
        run_s=EMPTY,
    )  # fmt: skip


EXITS = (stage("exit 1", 0.93216, 750), stage("exit 4", 0.5, 0), stage("final", 0.0, 250))

STATISTICS = ModelStatistics(
    mode="leave", backend="onnxruntime-cpu", policy_version=3, scheduling="slackfit", streams=2,
    streams_in_service=2, restarts=1, parallel_below=None, stages=EXITS, requests=1000,
    samples=1003, answered=1000, failed={"cancelled": 0, "backend_error": 3, "hopeless": 2},
    retried=6, queued=0, in_flight=0, queue_s=EMPTY,
    latency_s=Histogram(bounds=(0.1, 0.2), counts=(50, 50, 0), total=10.0), uptime_s=3725.0,
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Engine(FakeEngine):
    now: ModelStatistics = STATISTICS

    def statistics(self) -> Mapping[str, ModelStatistics]:
        return {model.name: self.now for model in self.served}


class Text(HTMLParser):
    """The page as a reader sees it, and that its tags are closed in order."""

    VOID = frozenset({"meta", "rect", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.parts: list[str] = []
        self.feed(page)
        self.text = " ".join(" ".join(self.parts).split())

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.parts.append(data)


def text_of(engine: FakeEngine, history: History | None = None) -> str:
    parsed = Text(render_status(engine, history))
    assert parsed.open == []
    return parsed.text


def test_exits_come_in_depth_order_with_thresholds_and_shares() -> None:
    view = view_model(fake_model(), STATISTICS, ready=True)
    assert [(e["stage"].label, e["threshold"], e["share"]) for e in view["exits"]] == [
        ("exit 1", "confidence ≥ 0.9322", 0.75),
        ("exit 4", "confidence ≥ 0.5000", 0.0),
        ("final", "everything left", 0.25),
    ]


def test_the_page_says_what_is_served() -> None:
    text = text_of(Engine())
    for words in (
        "fake ready",
        "mode leave · onnxruntime-cpu · 2 of 2 streams in service · scheduling slackfit",
        "scheduling slackfit · batches up to 32 · exit policy 3 · up 1 h 2 min",
        "x: float32 [batch, 4]",
        "logits: float32 [batch, 3]",
        "exit 1 confidence ≥ 0.9322 75.0 % 750 – –",
        "queue 0 – – – –",
        "request 100 100.00 ms 100.00 ms 190.00 ms 198.00 ms",
        "1,000 answered 0 queued 0 in flight Failures 0 forced (0.0 %) 5 failed 0 cancelled",
        "3 backend error 2 dropped early 6 retried 1 stream restarts",
        "Promise: disagreement with the unmodified model ≤ 1 % on data like the calibration set,",
        "set, certified with 95 % confidence on 5,000 samples (12 answered otherwise).",
    ):
        assert words in text
    for alarm in ("being forced", "out of service", "share forced"):
        assert alarm not in text


def test_the_plan_of_a_split_model_is_shown() -> None:
    assert "split by" not in text_of(Engine())
    text = text_of(Engine(now=dataclasses.replace(STATISTICS, extensions={"plan": PLAN})))
    for words in (
        "0 to 1 2 × fast and 1 × slow 2 of 3 1 get less work, 1 excluded",
        "2 to 5 1 × fast 1 of 1 –",
        "In batches of 8. Predicted under the forecast, without queues: 1,234.5 rows/s, 12.50 ms",
        "at worst; 1 spare, which help where they can.",
        "exit 0 25.0 % 50.0 % exit 2 – 30.0 %",
        "4 changes of plans, the last 2 min 5 s ago (better by 12.0%); 1 given up. When last",
        "When last looked at: a change would gain 1.0%, less than 10%.",
    ):
        assert words in text
    plan = dataclasses.replace(
        PLAN,
        reason="better by 12.0%",
        changing=True,
        changes=0,
        changed_s=None,
        spare=0,
        given_up=0,
    )
    text = text_of(Engine(now=dataclasses.replace(STATISTICS, extensions={"plan": plan})))
    assert "12.50 ms at worst." in text
    assert "0 changes of plans. Workers change to another plan now: better by 12.0%." in text


def test_the_last_window_of_the_batch_profile_is_shown_beside_its_forecast() -> None:
    assert "Rows that" not in text_of(Engine())
    status = ProfileStatus(window_s=120.0, windows=0)
    assert "Rows that" not in text_of(
        Engine(now=dataclasses.replace(STATISTICS, extensions={"batch_profile": status}))
    )
    before = dataclasses.replace(status, windows=3)
    text = text_of(
        Engine(now=dataclasses.replace(STATISTICS, extensions={"batch_profile": before}))
    )
    assert (
        "Rows that continue after each exit, by windows of 120 s 3 windows are kept from before; "
        "none is over since the start." in text
    )
    first = dataclasses.replace(status, windows=1, going_on=(0.75, None, 0.25))
    text = text_of(Engine(now=dataclasses.replace(STATISTICS, extensions={"batch_profile": first})))
    assert "Rows that continued after each exit in the last window of 120 s" in text
    assert "exit 0 75.0 % – – exit 2 25.0 % – –" in text
    assert "1 window is kept; nothing was forecast for this one." in text
    told = dataclasses.replace(first, windows=720, forecast=(0.7, 0.7, 0.5), method="last value")
    text = text_of(Engine(now=dataclasses.replace(STATISTICS, extensions={"batch_profile": told})))
    assert "exit 0 75.0 % 70.0 % +5.0 points exit 2 25.0 % 50.0 % -25.0 points" in text
    words = "720 windows are kept; forecast before it began by last value, conservatively."
    assert words in text


def test_lengths_are_counted_where_there_is_something_to_count() -> None:
    assert dict(view_model(fake_model(), STATISTICS, ready=True)["counts"]).keys() == {
        "requests", "samples", "answered", "queued", "in flight",
    }  # fmt: skip
    now = dataclasses.replace(STATISTICS, padded=12, unseen_lengths=3)
    counts = dict(view_model(fake_model(), now, ready=True)["counts"])
    assert counts["padded to share a batch"] == 12
    assert counts["of lengths unseen in calibration"] == 3


def test_forced_exits_are_conspicuous() -> None:
    exits = (stage("exit 1", 0.93216, 750, forced=125), *EXITS[1:])
    text = text_of(Engine(now=dataclasses.replace(STATISTICS, stages=exits)))
    assert "Exits are being forced: 125 answers (12.5 %) came from an exit" in text
    assert "because the scheduling policy (slackfit) forced them to leave there" in text
    assert "The promise does not hold for these answers;" in text
    assert "answers forced mean batch" in text
    assert "exit 1 confidence ≥ 0.9322 75.0 % 750 125 – –" in text
    assert "125 forced (12.5 %)" in text


def test_streams_that_failed_are_conspicuous() -> None:
    text = text_of(Engine(now=dataclasses.replace(STATISTICS, streams_in_service=1)))
    assert "Streams out of service: 1 of 2." in text
    assert "1 of 2 streams in service" in text


def test_workers_and_what_they_cost_are_told() -> None:
    now = dataclasses.replace(STATISTICS, workers=2, workers_in_service=1, resumed=5)
    text = text_of(Engine(now=now))
    assert "1 of 2 workers in service" in text
    assert "5 resumed" in text


def test_without_exits_the_note_is_loud() -> None:
    engine = Engine(now=dataclasses.replace(STATISTICS, stages=(stage("final", 0.0, 9),)))
    text = text_of(engine)
    assert "No exit is active" in text
    assert "Promise:" not in text


def test_mode_off_is_named_as_the_reason() -> None:
    off = dataclasses.replace(STATISTICS, mode="off", stages=(stage("final", 0.0, 9),))
    assert "Exits are switched off (--mode off)" in text_of(Engine(now=off))


def test_notes_on_how_a_model_is_served_take_the_place_of_the_mode() -> None:
    off = dataclasses.replace(STATISTICS, mode="off", stages=(stage("final", 0.0, 9),))
    noted = dataclasses.replace(fake_model(), notes=("the unmodified model is served", "so & so"))
    text = text_of(Engine(now=off, served=(noted,)))
    assert "The unmodified model is served." in text
    assert "So & so." in text
    assert "switched off" not in text
    assert "No exit is active" not in text


def test_exits_without_a_promise_are_warned_of() -> None:
    model = fake_model()
    bare = dataclasses.replace(model, policy=dataclasses.replace(model.policy, promise=None))
    assert "Exits are active without a promise" in text_of(Engine(served=(bare,)))


@pytest.mark.parametrize("evidence", Evidence)
def test_what_is_observed_stands_in_place_of_the_promise(evidence: Evidence) -> None:
    control = fake_control(evidence)
    text = text_of(Engine(now=dataclasses.replace(STATISTICS, mode="audit", control=control)))
    seen = view_agreement(dataclasses.replace(STATISTICS, control=control), PROMISE)
    assert seen is not None
    assert f"{seen.heading}: {seen.statement} Now: {seen.state}." in text
    assert "Agreement with the unmodified model, as observed while serving" in text
    assert f"{control.audited} audited {control.disagreed} disagreed" in text
    assert "Promise:" not in text
    assert "No exit is active" not in text


def test_an_exit_that_looks_on_lets_nothing_leave() -> None:
    exits = (stage("exit 1", 0.93216, 750), stage("exit 4", NEVER, 0), stage("final", 0.0, 250))
    view = view_model(fake_model(), dataclasses.replace(STATISTICS, stages=exits), ready=True)
    assert [e["threshold"] for e in view["exits"]] == [
        "confidence ≥ 0.9322", "nothing now", "everything left",
    ]  # fmt: skip


def test_a_hostile_name_is_escaped_everywhere() -> None:
    hostile = "<script>alert('x')</script>\"&"
    spec = TensorSpec(name=hostile, dtype="float32", shape=(hostile,))
    model: ModelInfo = dataclasses.replace(fake_model(hostile), inputs=(spec,), outputs=(spec,))
    page = render_status(Engine(served=(model,)))
    assert "<script" not in page
    assert hostile in Text(page).text


def test_a_server_that_leaves_is_not_ready() -> None:
    assert "fake not ready" in text_of(Engine(draining=True))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59, "59 s"), (185, "3 min 5 s"), (7800, "2 h 10 min"), (349_200, "4 d 1 h")],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert describe_duration(seconds) == words


def test_a_model_that_was_replaced_shows_its_version() -> None:
    assert "version 2" not in text_of(Engine())
    second = dataclasses.replace(STATISTICS, version=2, earlier=STATISTICS)
    assert "exit policy 3 · version 2 · up" in text_of(Engine(now=second))


def record(history: History, *snapshots: ModelStatistics, name: str = "fake") -> History:
    for number, statistics in enumerate(snapshots):
        history.record({name: statistics}, ready={name: True}, refused=0, now_s=5.0 * number,
                       unix_s=1_800_000_000.0 + 5.0 * number)  # fmt: skip
    return history


def counted(number: int, **others: Any) -> ModelStatistics:
    """Each interval 20 requests of 0.1 s at most, 60 samples, 30 + 10 answers, 5 failures."""
    answers = (30 * number, 0, 10 * number)
    return dataclasses.replace(
        STATISTICS,
        requests=20 * number,
        samples=60 * number,
        stages=tuple(
            dataclasses.replace(e, answered=a) for e, a in zip(EXITS, answers, strict=True)
        ),
        failed={"backend_error": 5 * number},
        latency_s=Histogram(bounds=(0.1, 0.2), counts=(20 * number, 0, 0), total=0.0),
        uptime_s=5.0 * number,
        **others,
    )


class Drawings(HTMLParser):
    """The charts of a page: labels, elements by class, and tooltips."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.labels: list[str] = []
        self.paths: dict[str, list[str]] = {}
        self.titles: list[str] = []
        self.texts: list[str] = []
        self._tag = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._tag = tag
        if tag == "svg" and given.get("role") == "img":
            self.labels.append(given["aria-label"] or "")
        if tag in {"path", "circle"}:
            drawn = given.get("d") or given.get("cx") or ""
            self.paths.setdefault(given.get("class") or "", []).append(drawn)

    def handle_data(self, data: str) -> None:
        if self._tag == "title" and self.labels:
            self.titles.append(data)
        if self._tag == "text":
            self.texts.append(data)

    def curves(self, class_: str) -> list[int]:
        """Count the points of the curves of a class that go beyond a legend's two."""
        return [len(d.split("L")) for d in self.paths.get(class_, []) if d != "M0,5L24,5"]


def drawings_of(*snapshots: ModelStatistics) -> Drawings:
    history = record(History(), *snapshots)
    page = render_status(Engine(now=snapshots[-1]), history)
    assert Text(page).open == []
    return Drawings(page)


def test_the_curves_have_a_point_for_each_interval() -> None:
    drawn = drawings_of(*map(counted, range(8)))
    assert drawn.curves("curve first") == [7, 7]  # requests, p50
    assert drawn.curves("curve second") == [7, 7]  # samples, p99
    assert drawn.curves("curve third") == [7]
    assert [len(d.split("M")) - 1 for d in drawn.paths["layer layer-0"]] == [7]
    assert [len(d.split("M")) - 1 for d in drawn.paths["layer layer-7"]] == [7]
    assert drawn.labels == [
        (
            "Rate, per second: requests: 4 now, from 4 to 4; samples: 12 now, from 12 to 12; "
            "unanswered samples: 1 now, from 1 to 1"
        ),
        (
            "Latency of requests, ms, logarithmic: p50: 50 now, from 50 to 50; "
            "p99: 99 now, from 99 to 99"
        ),
        "Answers by place, %: exit 1: 75 now, from 75 to 75; final: 25 now, from 25 to 25",
    ]


def test_axes_have_round_ticks_with_units() -> None:
    drawn = drawings_of(*map(counted, range(61)))
    rates, latencies, shares = (
        ["0", "5", "10"],
        ["50", "100"],
        ["0", "25", "50", "75", "100"],
    )
    times = ["now", "−2 min", "−4 min"]
    assert drawn.texts == [*rates, *times, *latencies, *times, *shares, *times]


def test_a_curve_has_a_gap_where_nothing_was_answered() -> None:
    idle = dataclasses.replace(counted(3), uptime_s=20.0)
    after = [dataclasses.replace(counted(n), uptime_s=5.0 * n + 5) for n in (4, 5)]
    drawn = drawings_of(*map(counted, range(4)), idle, *after, after[-1], counted(6))
    assert drawn.curves("curve first") == [8, 3, 2]  # requests; p50 before and after the gap
    assert len(drawn.paths["dot first"]) == 1  # and one point alone
    assert [len(d.split("M")) - 1 for d in drawn.paths["layer layer-0"]] == [6]


def test_the_stack_of_shares_ends_at_100_percent() -> None:
    drawn = drawings_of(counted(0), counted(1))
    (below,), (above,) = drawn.paths["layer layer-7"], drawn.paths["layer layer-0"]
    # 166 is 0 %, 16 is 100 %: the end has 25 % of 150 pixels, exit 1 the rest
    assert below == "M355.83,166V128.5H384V166Z"
    assert above == "M355.83,128.5V16H384V128.5Z"


def test_disagreement_is_drawn_with_its_bound_and_the_constraint() -> None:
    control = fake_control(Evidence.CERTIFIED)
    unsure = dataclasses.replace(control, disagreement=None, disagreement_upper_bound=1.0)
    drawn = drawings_of(
        *(counted(n, control=unsure if n < 4 else control, mode="audit") for n in range(7))
    )
    assert drawn.curves("curve first") == [6, 6, 3]
    assert drawn.curves("curve second") == [6, 6, 3]
    assert drawn.curves("curve limit") == [6]
    assert drawn.labels[3] == (
        "Disagreement with the unmodified model, %: measured: 0.24 now, from 0.24 to 0.24; "
        "upper bound: 0.83 now, from 0.83 to 0.83; constraint: 1 now, from 1 to 1"
    )


def test_a_bound_far_above_the_constraint_is_drawn_at_the_top() -> None:
    wide = dataclasses.replace(fake_control(Evidence.CERTIFIED), disagreement_upper_bound=0.6)
    snapshots = [counted(n, control=wide) for n in range(3)]
    text = text_of(Engine(now=snapshots[-1]), record(History(), *snapshots))
    assert "measured 0.24 upper bound 60 ↑ constraint 1" in text
    drawn = drawings_of(*snapshots)
    assert {d.rpartition(",")[2] for d in drawn.paths["curve second"][-1:]} == {"16"}
    assert drawn.texts[-7:] == ["0", "2", "4", "now", "−20 s", "−40 s", "−1 min"]
    assert "upper bound: 60 now" in drawn.labels[3]


def test_events_are_marked_in_every_chart_and_listed() -> None:
    alarm = dataclasses.replace(fake_control(Evidence.CERTIFIED), alarms=1)
    snapshots = [
        counted(0, control=fake_control(Evidence.CERTIFIED)),
        counted(1, control=fake_control(Evidence.CERTIFIED), streams=3),
        counted(2, control=alarm),
        counted(3, control=alarm),
    ]
    history = record(History(), *snapshots)
    page = render_status(Engine(now=snapshots[-1]), history)
    words = "drift alarm; the controller is now steady"
    assert [t for t in Drawings(page).titles if "drift" in t] == [f"5 s ago: {words}"] * 4
    assert f"time, UTC age kind what happened 08:00:10 5 s ago drift {words}" in text_of(
        Engine(now=snapshots[-1]), history
    )
    assert "None: no drift alarm" not in page


def test_many_events_fold_up() -> None:
    snapshots = [counted(n, policy_version=n) for n in range(1, 13)]
    text = text_of(Engine(now=snapshots[-1]), record(History(), *snapshots))
    assert "now policy exit policy 12 replaced exit policy 11" in text
    assert "3 earlier time, UTC" in text


def test_tiles_are_of_the_latest_interval() -> None:
    snapshots = [counted(0), counted(1), counted(3)]
    text = text_of(Engine(now=snapshots[-1]), record(History(), *snapshots))
    assert (
        "8/s requests 24/s samples 50.00 ms latency, p50 99.00 ms latency, p99 "
        "75.0 % answered early 2/s unanswered samples Rate, per second"
    ) in text


def test_words_stand_where_there_is_nothing_to_draw() -> None:
    text = text_of(Engine())
    assert text.count("No interval is complete yet: the first one takes 5 s.") == 5
    assert "None: no drift alarm" in text
    assert "answered early" not in text
    text = text_of(Engine(), record(History(), counted(1), counted(1)))
    assert text.count("No request was answered in the last 15 minutes.") == 2
    assert "not compared with the unmodified model's in mode leave; use --mode" in text
    assert "None in the last 15 minutes." in text


def test_refused_requests_of_all_models_have_a_chart() -> None:
    history = History()
    for second, refused in ((0, 0), (5, 0), (10, 15), (15, 15)):
        history.record({}, ready={}, refused=refused, now_s=second, unix_s=second)
    drawn = Drawings(render_status(Engine(served=()), history))
    assert drawn.labels == [
        "Requests refused or failed, per second, all models: refused or failed: 0 now, from 0 to 3"
    ]
    assert drawn.curves("curve third") == [3]


def test_places_share_the_colours_where_they_are_many() -> None:
    stages = [stage(f"exit {n}", 0.5, 10) for n in range(20)]
    before = dataclasses.replace(
        STATISTICS, stages=tuple(dataclasses.replace(s, answered=0) for s in stages)
    )
    now = dataclasses.replace(STATISTICS, stages=tuple(stages), uptime_s=4000.0)
    layers = {name: d for name, d in drawings_of(before, now).paths.items() if "layer" in name}
    assert layers.keys() == {f"layer layer-{n}" for n in range(8)}
    assert sum(map(len, layers.values())) == 20


def test_hostile_names_are_escaped_in_the_charts() -> None:
    hostile = "<script>alert('x')</script>\"&"
    stages = tuple(dataclasses.replace(e, label=hostile + e.label) for e in EXITS)
    before = dataclasses.replace(STATISTICS, stages=stages[:1] + stages[2:])
    after = dataclasses.replace(
        before,
        stages=tuple(dataclasses.replace(e, answered=e.answered + 1) for e in before.stages),
        learning=LearningStatus(phase="stopped", text=hostile, recorded=0, wanted=0),
    )
    model = dataclasses.replace(fake_model(hostile))
    page = render_status(
        Engine(served=(model,), now=after), record(History(), before, after, name=hostile)
    )
    assert "<script" not in page
    drawn = Drawings(page)
    assert f"now: learning: {hostile}" in drawn.titles
    assert f"{hostile}exit 1: 50 now" in drawn.labels[1]


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0"), (0.126, "0.126"), (99.96, "100"), (999.6, "1k"), (12_345, "12.3k"), (2.5e6, "2.5M")],
)
def test_numbers_have_three_digits(value: float, words: str) -> None:
    assert short_number(value) == words


@pytest.mark.parametrize(("seconds", "words"), [(0.2, "now"), (40, "40 s ago"), (120, "2 min ago")])
def test_ages_in_words(seconds: float, words: str) -> None:
    assert describe_age(seconds) == words
