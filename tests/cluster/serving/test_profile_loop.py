"""The batch profile while serving: windows, their forecasts, and the file that keeps them."""

from __future__ import annotations

import json
import logging
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.cluster.loops import profiles_of
from tests.facts import tells
from tests.fakes import FAKE_HASH, fake_model, script
from tests.unit.engine.serving import with_engine

from offramp.cluster.planning.batch_profile import (
    BatchProfile,
    ProfileStatus,
    ProfileWindow,
    dump_batch_profile,
    parse_recorded,
)
from offramp.cluster.planning.forecasting import LastValue, forecast_continue_shares
from offramp.cluster.serving.cluster_statistics import profile_of
from offramp.cluster.serving.profile_file import ProfileFile
from offramp.cluster.serving.profile_loop import ProfileLoop
from offramp.engine.core import Engine
from offramp.engine.requests.departures import Departures
from offramp.engine.serving.executor import Executor
from offramp.testing.backend import SCRIPT, FakeBackend

EPOCH_S = 1_764_064_800.0
"""2025-11-25 10:00 UTC, when the clock says 1000."""


class Counting:
    """Fake executor with the counts of the test."""

    def __init__(self) -> None:
        self.left = np.zeros(3, np.int64)
        self.alone = np.zeros(2, np.int64)

    def snapshot(self, model: str) -> SimpleNamespace:
        assert model == "m"
        both = Departures(exits=(0, 1), left=tuple(self.left.tolist()), forced=(0, 0, 0))
        one = Departures(exits=(1,), left=tuple(self.alone.tolist()), forced=(0, 0))
        return SimpleNamespace(departures=(both, one) if self.alone.any() else (both,))


def beside(file: ProfileFile | None) -> Path | None:
    """Return the bundle next to which a file is kept."""
    return None if file is None else file.path.with_name(file.path.name.partition(".m@")[0])


class Serving:
    """A loop over counts and clocks that the test moves."""

    def __init__(self, file: ProfileFile | None = None) -> None:
        self.counting, self.now_s = Counting(), 1000.0
        model = fake_model(FakeBackend(), (0.9, 0.9), state_bundle=beside(file))
        self.loop = ProfileLoop(
            cast(Executor, self.counting),
            {"m": model},
            window_s=120.0,
            wall=lambda: EPOCH_S,
            clock=lambda: self.now_s,
        )

    def window(self, *left: int, late_s: float = 0.0) -> ProfileStatus:
        """Pass a window in which these numbers of rows left at exit 0, exit 1 and the end."""
        self.counting.left += left or (0, 0, 0)
        self.now_s += 120.0 + late_s
        self.loop.poll()
        return self.status

    @property
    def status(self) -> ProfileStatus:
        status = self.loop.status("m")
        assert status is not None
        return status


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProfileFile:
    monkeypatch.setattr("platform.node", lambda: "one")
    return ProfileFile.of(tmp_path / "small.ee", "m")


def begun(file: ProfileFile | None = None) -> Serving:
    """A loop without its thread: the test ends the windows."""
    serving = Serving(file)
    serving.loop._thread.start = lambda: None  # type: ignore[method-assign]
    serving.loop.start()
    return serving


def test_windows_have_what_left_in_them_and_no_more(file: ProfileFile) -> None:
    serving = begun(file)
    assert serving.status == ProfileStatus(window_s=120.0, windows=0)
    first = serving.window(50, 30, 20)
    assert first == ProfileStatus(window_s=120.0, windows=1, going_on=(0.5, 0.2))
    second = serving.window(10, 0, 30)
    kept = parse_recorded(file.path.read_text())
    assert kept.bundle == FAKE_HASH
    assert kept.profile.windows == (
        ProfileWindow(start_s=EPOCH_S, decided=(100, 50), went_on=(50, 20)),
        ProfileWindow(start_s=EPOCH_S + 120, decided=(40, 30), went_on=(30, 30)),
    )
    assert kept.profile.describe() == "2 windows of 120 s, 2025-11-25 10:00 to 10:04 UTC"
    assert (second.windows, second.going_on) == (2, (0.75, 0.75))
    # What was forecast for it is what a plan made before it would have been made on.
    before = BatchProfile(window_s=120.0, exits=2, windows=kept.profile.windows[:1])
    assert second.forecast == forecast_continue_shares(before, LastValue())
    assert second.method == "last value"


def test_windows_without_rows_are_left_out_and_their_forecast_stands() -> None:
    serving = begun()
    serving.window(5, 3, 2)
    assert serving.window().windows == 1
    assert serving.window(late_s=1e6).windows == 1
    after = serving.window(5, 5, 0)
    assert (after.windows, after.going_on) == (2, (0.5, 0.0))
    assert after.forecast is not None


def test_a_window_that_ends_late_does_not_shift_the_next_but_after_a_pause(
    file: ProfileFile,
) -> None:
    serving = begun(file)
    serving.window(1, 1, 1, late_s=7.0)
    serving.now_s -= 7.0
    serving.window(1, 1, 1)
    serving.window(1, 1, 1, late_s=500.0)  # the machine slept, say
    serving.window(1, 1, 1)
    starts = [w.start_s - EPOCH_S for w in parse_recorded(file.path.read_text()).profile.windows]
    assert starts == [0.0, 120.0, 240.0, 860.0]


def test_exits_that_are_off_count_nothing() -> None:
    serving = begun()
    serving.window(5, 3, 2)
    serving.counting.alone += (4, 4)
    alone = serving.window()
    assert alone.going_on == (None, 0.5)
    serving.counting.alone += (4, 4)  # both sets in one window: a swap, midway
    both = serving.window(8, 0, 0)
    assert both.going_on == (0.0, 0.0)


def test_a_restart_goes_on(file: ProfileFile, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    old = begun(file)
    old.window(50, 30, 20)
    old.loop.stop()
    assert [p.name for p in file.path.parent.iterdir()] == ["small.ee.m@one.batch-profile.json"]
    new = begun(file)
    tells(caplog.text, "1 windows", "small.ee.m@one.batch-profile.json")
    assert new.status.windows == 1
    went_on = new.window(1, 1, 2)
    assert went_on.windows == 2
    assert went_on.forecast is not None
    new.loop.stop()


def test_one_server_at_a_time_writes(file: ProfileFile, caplog: pytest.LogCaptureFixture) -> None:
    first, second = begun(file), begun(file)
    second.window(1, 1, 1)
    assert not file.path.exists()
    tells(caplog.text, "another server")
    first.loop.stop()
    second.loop.stop()  # keeps what it could not before
    assert len(parse_recorded(file.path.read_text()).profile.windows) == 1


WINDOW = ProfileWindow(start_s=0.0, decided=(4, 2), went_on=(2, 0))
GOOD = BatchProfile(window_s=120.0, exits=2, windows=(WINDOW,))


@pytest.mark.parametrize(
    ("profile", "bundle", "said"),
    [
        (
            GOOD,
            "00" * 32,
            r"belongs to bundle '0000.* in windows of 120 s; now served: bundle 'fafa",
        ),
        (
            BatchProfile(window_s=60.0, exits=2, windows=(WINDOW,)),
            FAKE_HASH,
            "in windows of 60 s; now served: .* windows of 120 s: a new batch profile begins",
        ),
        (BatchProfile(window_s=120.0, exits=7), FAKE_HASH, "with 7 exits"),
    ],
)
def test_windows_of_something_else_begin_anew_in_a_line(
    file: ProfileFile,
    caplog: pytest.LogCaptureFixture,
    profile: BatchProfile,
    bundle: str,
    said: str,
) -> None:
    caplog.set_level(logging.INFO)
    file.path.write_text(dump_batch_profile(profile, bundle))
    assert begun(file).status.windows == 0
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "\n" not in record.getMessage()
    assert re.search(said, record.getMessage())


def with_window(**changes: Any) -> bytes:
    document = json.loads(dump_batch_profile(GOOD, FAKE_HASH))
    document["batch_profile"]["windows"][0] |= changes
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[" * 100_000,
        b'{"schema": 1}',
        b'{"schema": 1, "bundle": ["\\n"], "batch_profile": {}}',
        with_window(decided=[10**400, 2]),
        with_window(decided=[-1, 2]),
        with_window(went_on=[5, 0]),
        with_window(start_s=float("nan")),
        with_window(decided=[4, 2, 1]),
        b" " * (2**24 + 1),
    ],
    ids=lambda content: repr(content[:30]),
)
def test_whatever_the_file_says_serving_starts(
    file: ProfileFile, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    file.path.write_bytes(content)
    serving = begun(file)
    (record,) = caplog.records
    assert "a new batch profile begins" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert serving.status.windows == 0
    assert serving.window(1, 1, 1).windows == 1
    assert parse_recorded(file.path.read_text()).bundle == FAKE_HASH


def test_a_time_that_no_calendar_knows_is_said_in_seconds(file: ProfileFile) -> None:
    file.path.write_bytes(with_window(start_s=1e300))
    profile = file.load(bundle=FAKE_HASH, exits=2, window_s=120.0)
    assert profile is not None
    assert profile.describe() == "1 window of 120 s, second 1e+300 to 1e+300"


def test_an_unwritable_folder_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "place").mkdir()
    serving = begun(ProfileFile.of(tmp_path / "place" / "x.ee", "m"))
    serving.loop._recorded["m"].file.path = tmp_path / "none" / "x"  # type: ignore[union-attr]
    serving.window(1, 1, 1)
    assert serving.window(1, 1, 1).windows == 2
    (record,) = caplog.records
    assert "cannot be written" in record.getMessage()


def test_windows_end_by_themselves() -> None:
    serving = Counting()
    serving.left += (5, 3, 2)
    model = fake_model(FakeBackend(), (0.9, 0.9))
    loop = ProfileLoop(cast(Executor, serving), {"m": model}, window_s=0.01)
    loop.start()
    ended = threading.Event()
    while not ended.wait(0.001):
        status = loop.status("m")
        assert status is not None
        if status.windows:
            ended.set()
    loop.stop()
    assert status.going_on == (0.5, 0.2)
    assert not loop._thread.is_alive()


def test_a_model_without_exits_to_run_has_no_windows() -> None:
    model = replace(fake_model(FakeBackend()), exits=0)
    loop = ProfileLoop(cast(Executor, Counting()), {"m": model})
    loop.start()
    assert loop.status("m") is None
    loop.stop()


def test_an_engine_records_and_tells(tmp_path: Path) -> None:
    file = ProfileFile.of(tmp_path / "x.ee", "fake")

    async def body(engine: Engine, _backend: FakeBackend) -> None:
        rows = script([0.95, 0.1], [0.5, 0.1], [0.5, 0.2], [0.5, 0.3])
        await engine.infer("fake", {SCRIPT: rows})
        profiles_of(engine).poll()
        status = profile_of(engine.statistics()["fake"])
        assert status == ProfileStatus(window_s=120.0, windows=1, going_on=(0.75,))

    with_engine(body, state_bundle=tmp_path / "x.ee")
    assert len(parse_recorded(file.path.read_text()).profile.windows) == 1


def test_a_model_that_is_added_takes_the_file_of_the_one_that_it_replaces(
    file: ProfileFile,
) -> None:
    serving = begun(file)
    serving.counting.snapshot = lambda model: Counting.snapshot(serving.counting, "m")  # type: ignore[method-assign]
    serving.window(50, 30, 20)
    model = fake_model(FakeBackend(), (0.9, 0.9), state_bundle=beside(file))
    serving.loop.add("m2", "m", model)
    status = serving.loop.status("m2")
    assert status is not None and status.windows == 1, "the same bundle goes on"
    serving.window(10, 0, 30)
    serving.loop.remove("m")
    assert serving.loop.status("m") is None
    windows = parse_recorded(file.path.read_text()).profile.windows
    assert [window.decided[0] for window in windows] == [100, 140]
    serving.counting.left += (1, 1, 1)
    serving.now_s += 120.0
    serving.loop.poll()
    assert len(parse_recorded(file.path.read_text()).profile.windows) == 3
    serving.loop.stop()


def test_a_model_that_was_added_in_vain_returns_the_file(file: ProfileFile) -> None:
    serving = begun(file)
    model = fake_model(FakeBackend(), (0.9, 0.9), state_bundle=beside(file))
    serving.loop.add("m2", "m", model)
    serving.loop.remove("m2", save=False)
    serving.loop.remove("m2", save=False)  # it is gone already
    serving.window(50, 30, 20)
    assert len(parse_recorded(file.path.read_text()).profile.windows) == 1


def test_the_loop_starts_with_the_first_model_that_has_exits() -> None:
    serving = Counting()
    serving.left += (5, 3, 2)
    plain = replace(fake_model(FakeBackend()), exits=0)
    loop = ProfileLoop(cast(Executor, serving), {"plain": plain}, window_s=0.01)
    loop.start()
    assert not loop._thread.is_alive()
    loop.add("plain2", "plain", plain)
    assert not loop._thread.is_alive()
    loop.add("m", "plain", fake_model(FakeBackend(), (0.9, 0.9)))
    while not (status := loop.status("m")) or not status.windows:
        threading.Event().wait(0.001)
    loop.stop()
    assert not loop._thread.is_alive()
