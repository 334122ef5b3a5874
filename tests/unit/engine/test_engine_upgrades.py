"""Building engines while serving: requests, detection of results, and end of builds."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.engines import engine_bundle
from tests.facts import tells

from offramp.engine.common import compiler_process
from offramp.engine.common.compiler_process import BuildProcess
from offramp.engine.control.engine_builds import BuildBudget
from offramp.engine.serving.engine_upgrades import LOOK_S, EngineUpgrades
from offramp.engine.stages.backend_protocol import MissingEngine

PATIENCE_S = 120.0


class FakeBuild:
    """A build that ends when the test says so."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)
        self.status: int | None = None
        self.ended = False

    def poll(self) -> int | None:
        return self.status

    def last_words(self) -> str:
        return "eecompile: the GPU has no memory left"

    def end(self) -> None:
        self.ended = True


class Place:
    """Upgrades on virtual time, and the builds that they started."""

    def __init__(self, *, budget: bool = True) -> None:
        self.now_s = 0.0
        self.builds: list[FakeBuild] = []
        self.there: set[str] = set()
        self.looks = 0
        self.upgrades = EngineUpgrades(
            BuildBudget(share=0.1) if budget else None,
            start=self._start,
            clock=lambda: self.now_s,
        )

    def _start(self, arguments: Sequence[str]) -> FakeBuild:
        self.builds.append(FakeBuild(arguments))
        return self.builds[-1]

    def missing(self, unit: str, precision: Any = "fp16") -> MissingEngine:
        def is_built() -> bool:
            self.looks += 1
            return unit in self.there

        return MissingEngine(
            unit=unit,
            bundle=Path("/models/b.ee"),
            device="cuda:1",
            precision=precision,
            is_built=is_built,
        )

    def look(self, *missing: MissingEngine, seconds: float = 0.0) -> bool:
        """Check for missing engines later, as the control loop does."""
        self.now_s += seconds
        self.upgrades.step()
        return self.upgrades.check_missing("m", missing)


def test_missing_engines_are_built_by_one_command_and_noticed_at_once() -> None:
    place = Place()
    missing = place.missing("02-03"), place.missing("00-01-exit1")
    assert not place.look(*missing)
    assert not place.look(*missing, seconds=59.0)
    assert place.builds == []
    assert not place.look(*missing, seconds=1.0)
    (build,) = place.builds
    assert build.arguments == [
        "build", "/models/b.ee", "--device", "cuda:1", "--precision", "fp16",
        "--units", "00-01-exit1,02-03", "--while-serving",
    ]  # fmt: skip
    assert not place.look(*missing, seconds=10.0)
    build.status, place.there = 0, {"02-03", "00-01-exit1"}
    assert place.look(*missing)  # though the next look would be seconds away
    assert build.ended
    assert not place.look(seconds=1000.0)
    assert len(place.builds) == 1


def test_a_failed_build_is_told_and_tried_once_more(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    missing = place.missing("02-03")
    place.look(missing)
    place.look(missing, seconds=60.0)
    place.builds[0].status = 1
    place.look(missing, seconds=1.0)
    tells(caplog.text, "eecompile", "no memory left", "chains")
    place.look(missing, seconds=299.0)
    assert len(place.builds) == 1
    for _ in range(100):
        place.look(missing, seconds=300.0)
        if place.builds[-1].status is None:
            place.builds[-1].status = 1
    assert len(place.builds) == 2


def test_a_build_without_end_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    missing = place.missing("02-03")
    place.look(missing)
    place.look(missing, seconds=60.0)
    place.look(missing, seconds=1801.0)
    assert place.builds[0].ended
    assert "ended after 1801 s" in caplog.text


def test_closing_ends_the_build_that_runs() -> None:
    place = Place()
    missing = place.missing("02-03")
    place.look(missing)
    place.look(missing, seconds=60.0)
    place.upgrades.close()
    assert place.builds[0].ended


def test_without_a_budget_nothing_is_built_and_what_others_build_is_noticed() -> None:
    place = Place(budget=False)
    missing = place.missing("02-03")
    assert not place.look(missing)
    place.there.add("02-03")
    for _ in range(29):  # the index is read now and then, not at every look
        assert not place.look(missing, seconds=1.0)
    assert place.looks == 1
    assert place.look(missing, seconds=LOOK_S - 29.0)
    assert place.builds == []


def test_int8_needs_data_that_no_server_has(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    for _ in range(10):
        place.look(place.missing("02-03", precision="int8"), seconds=100.0)
    assert place.builds == []
    assert caplog.text.count("int8 engines need data to build: eecompile build") == 1


def test_a_process_that_cannot_be_started_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()

    def refuse(arguments: Sequence[str]) -> FakeBuild:
        raise OSError("no memory for a process")

    place.upgrades._start = refuse
    missing = place.missing("02-03")
    place.look(missing)
    place.look(missing, seconds=60.0)
    place.look(missing, seconds=60.0)
    assert caplog.text.count("no process can build engines: no memory for a process") == 1


def wait_for(build: BuildProcess) -> int:
    until_s = time.monotonic() + PATIENCE_S
    while (status := build.poll()) is None:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    return status


def test_the_compiler_runs_in_a_process_and_its_error_is_told(tmp_path: Path) -> None:
    bundle = engine_bundle("mlp", tmp_path / "b.ee")
    asked = ["build", str(bundle.path), "--dry-run", "--units"]
    build = BuildProcess([*asked, "00-01-exit1"])
    try:
        assert wait_for(build) == 0, build.last_words()
        assert build.last_words().startswith("1 of 1 engines would be built")
    finally:
        build.end()
    refused = BuildProcess([*asked, "00-09"])
    try:
        assert wait_for(refused) == 1
        assert refused.last_words().startswith("eecompile: --units: there is no '00-09'")
    finally:
        refused.end()
        refused.end()


_SLEEPER = """\
import time
print("at work", flush=True)
time.sleep(600)
"""


@pytest.fixture
def sleeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of the compiler, what never ends."""
    (tmp_path / "offramp_test_sleeper.py").write_text(_SLEEPER)
    worker = (
        "from offramp.engine.common import build_worker\n"
        "build_worker._COMPILER = 'offramp_test_sleeper'\n"
        "build_worker.main()\n"
    )
    (tmp_path / "offramp_test_worker.py").write_text(worker)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(compiler_process, "_WORKER", "offramp_test_worker")


def at_work(build: BuildProcess) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while build.last_words() != "at work":
        assert build.poll() is None, build.last_words()
        assert time.monotonic() < until_s
        time.sleep(0.05)


@pytest.mark.usefixtures("sleeper")
def test_a_build_can_be_ended_amid_its_work() -> None:
    build = BuildProcess([])
    at_work(build)
    build.end()
    assert build.poll() not in (None, 0)


@pytest.mark.usefixtures("sleeper")
@pytest.mark.skipif(sys.platform == "win32", reason="pipes end otherwise there")
def test_a_build_ends_with_its_server() -> None:
    """The system closes the server's end of the pipe, whatever killed it."""
    build = BuildProcess([])
    try:
        at_work(build)
        assert build._process.stdin is not None
        build._process.stdin.close()
        assert wait_for(build) == 1
    finally:
        build.end()
