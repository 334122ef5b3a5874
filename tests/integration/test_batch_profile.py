"""The batch profile from serving to a plan: what a server kept is what a cluster is planned on."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.cluster.loops import profiles_of

from offramp.bundle import Bundle
from offramp.cluster.planning.batch_profile import RecordedProfile, parse_recorded
from offramp.cluster.planning.forecasting import forecast_next
from offramp.compiler.commands.cli import main
from offramp.engine.common.control_state import identity_of
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.stages.plan import Mode

BUNDLE = Path(__file__).parents[1] / "golden" / "bundle"
CLUSTER = "[devices.cpu]\ncount = 4\ncost_per_hour = 1.0\nspeed = 1.0\n"
SAMPLES = np.arange(200)[:, None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(BUNDLE, tmp_path / "golden.ee")
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return tmp_path


def serve(folder: Path, mode: Mode, windows: int = 1) -> NDArray[np.int32]:
    """Serve all samples in each window; gives [200] the exits that answered."""
    options = EngineOptions(
        mode=mode, backend="onnxruntime", threads=1,
        defaults=ModelOptions(max_batch_size=8, controller="static", ramp_budget=100.0),
    )  # fmt: skip

    async def run() -> NDArray[np.int32]:
        async with await Engine.open({"golden": folder / "golden.ee"}, options) as engine:
            for _ in range(windows):
                exits = (await engine.infer("golden", {"sample": SAMPLES})).exits
                profiles_of(engine).poll()
            return exits

    return asyncio.run(run())


def kept(folder: Path) -> RecordedProfile:
    (file,) = folder.glob("golden.ee.golden@*.batch-profile.json")
    return parse_recorded(file.read_text())


@pytest.mark.parametrize("mode", [Mode.LEAVE, Mode.AUDIT, Mode.RELEASE])
def test_a_window_is_what_exits_answered_in_every_mode(folder: Path, mode: Mode) -> None:
    exits = serve(folder, mode)
    recorded, bundle = kept(folder), Bundle.open(folder / "golden.ee")
    assert recorded.bundle == identity_of(bundle)["bundle"]
    (window,) = recorded.profile.windows
    here = len(SAMPLES)
    for active in bundle.policy.active:
        left = int((exits == active.exit).sum())
        assert (window.decided[active.exit], window.went_on[active.exit]) == (here, here - left)
        here -= left
    assert here < len(SAMPLES), "some left"
    in_use = {active.exit for active in bundle.policy.active}
    off = [k for k in range(recorded.profile.exits) if k not in in_use]
    assert not any(window.decided[k] for k in off)


def test_where_no_exit_runs_nothing_is_recorded(folder: Path) -> None:
    serve(folder, Mode.OFF)
    assert list(folder.glob("*.batch-profile.*")) == []


def test_plans_are_made_on_what_was_served(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "1000")
    serve(folder, Mode.AUDIT, windows=2)
    serve(folder, Mode.AUDIT)  # a restart goes on
    (file,) = folder.glob("golden.ee.golden@*.batch-profile.json")
    profile = kept(folder).profile
    assert len(profile.windows) == 3
    capsys.readouterr()
    assert (
        main(["plan", "golden.ee", "--cluster", "cluster.toml", "--batch-profile", file.name]) == 0
    )
    method = forecast_next(profile).method
    told = f"from a conservative forecast ({method}, quantile 0.8) of {profile.describe()}, in "
    assert told in capsys.readouterr().out
