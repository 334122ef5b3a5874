"""Parts of a bundle that become engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engines import engine_bundle

from offramp.bundle import NEVER, ActiveExit, Bundle
from offramp.compiler.engines.build_options import PARTS
from offramp.compiler.engines.units import Unit, segment_units, source_unit, stage_units, units_of


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """Six segments, exits after 0, 2 and 3; the last two are in use, the last in shadow mode."""
    active = (ActiveExit(exit=1, threshold=0.5), ActiveExit(exit=2, threshold=NEVER))
    return engine_bundle("bert", tmp_path / "b.ee", exits_after=(0, 2, 3), active=active)


SOURCE = Unit(0, 5, None)
STAGES = [Unit(0, 2, 1), Unit(3, 5, None), Unit(3, 3, 2), Unit(4, 5, None)]
SEGMENTS = [Unit(0, 0, 0), Unit(1, 1, None), Unit(2, 2, 1), Unit(3, 3, 2), Unit(4, 4, None),
            Unit(5, 5, None)]  # fmt: skip


def test_the_source_is_all_segments(bundle: Bundle) -> None:
    assert source_unit(bundle.manifest) == SOURCE


def test_stages_cover_modes_that_leave_and_modes_that_observe(bundle: Bundle) -> None:
    """Switched off, an exit ends no stage where samples leave, but is asked where one observes."""
    assert list(stage_units(bundle)) == STAGES


def test_segments_have_the_exit_that_is_attached(bundle: Bundle) -> None:
    assert list(segment_units(bundle.manifest)) == SEGMENTS


def test_each_unit_once(bundle: Bundle) -> None:
    """The stage of segment 3 is a segment unit too."""
    assert list(units_of(bundle)) == [SOURCE, *STAGES, *(s for s in SEGMENTS if s not in STAGES)]


@pytest.mark.parametrize(
    ("parts", "units"),
    [
        (["source"], [SOURCE]),
        (["stages"], STAGES),
        (["segments"], SEGMENTS),
        (["segments", "source"], [SOURCE, *SEGMENTS]),
        ([], []),
    ],
)
def test_parts(bundle: Bundle, parts: list, units: list[Unit]) -> None:
    assert list(units_of(bundle, parts)) == units


def test_without_exits_in_use_the_only_stage_is_the_source(tmp_path: Path) -> None:
    bundle = engine_bundle("mlp", tmp_path / "b.ee", active=())
    assert stage_units(bundle) == (source_unit(bundle.manifest),)
    assert [u.name for u in units_of(bundle, PARTS)] == [
        "00-03", "00-00-exit0", "01-01-exit1", "02-02", "03-03",
    ]  # fmt: skip


def test_names() -> None:
    assert Unit(0, 12, None).name == "00-12"
    assert Unit(0, 3, 1).name == "00-03-exit1"
    assert Unit(100, 101, 11).name == "100-101-exit11"
