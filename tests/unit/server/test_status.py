"""The words and figures of the status page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from html.parser import HTMLParser

import pytest
from tests.unit.server.test_metrics import PLAN

from offramp.bundle import NEVER, TensorSpec
from offramp.cluster.planning.batch_profile import ProfileStatus
from offramp.engine.control.controller import Evidence
from offramp.engine.requests.results import ModelInfo
from offramp.engine.requests.statistics import Histogram, ModelStatistics, StageStatistics
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


def text_of(engine: FakeEngine) -> str:
    parsed = Text(render_status(engine))
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
        "1,000 answered 0 queued 0 in flight Trouble 0 forced (0.0 %) 5 failed 0 cancelled",
        "3 backend error 2 given up early 6 retried 1 stream restarts",
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
        "Rows that go on behind each exit, by windows of 120 s 3 windows are kept from before; "
        "none is over since the start." in text
    )
    first = dataclasses.replace(status, windows=1, going_on=(0.75, None, 0.25))
    text = text_of(Engine(now=dataclasses.replace(STATISTICS, extensions={"batch_profile": first})))
    assert "Rows that went on behind each exit in the last window of 120 s" in text
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
    assert "because the scheduling policy (slackfit) had them leave there" in text
    assert "The promise does not hold for these;" in text
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
