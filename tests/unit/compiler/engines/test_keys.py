"""Dependencies of engines, and the messages when they change."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.facts import Told, facts

from offramp.bundle import engine_index
from offramp.bundle.engines import EngineTarget, ShapeProfile, ShapeRange
from offramp.compiler.engines.build_options import BuildSettings
from offramp.compiler.engines.building import differences, engine_key

TARGET = EngineTarget(
    gpu="NVIDIA H200", compute_capability=(9, 0), tensorrt="10.16.0.72", precision="fp16"
)
SETTINGS = BuildSettings(precision="fp16")


def profile(first: int, last: int, width: int = 4) -> ShapeProfile:
    shapes = ShapeRange(least=(first, width), best=(last, width), most=(last, width))
    return ShapeProfile(first_batch=first, last_batch=last, inputs={"x": shapes})


PROFILES = (profile(1, 1), profile(2, 8))


def key(
    *,
    target: EngineTarget = TARGET,
    graph: bytes = b"graph",
    profiles: Sequence[ShapeProfile] = PROFILES,
    parts: str = "p",
    **settings: int,
) -> dict[str, str]:
    """Return the key of an engine with some non-default parts."""
    chosen = replace(SETTINGS, **settings)  # type: ignore[arg-type]
    return engine_key(target, chosen, graph, profiles, parts=parts)


KEY = key()


def test_everything_that_an_engine_depends_on_is_named() -> None:
    assert dict(KEY) == {
        "tensorrt": "10.16.0.72",
        "gpu": "NVIDIA H200",
        "compute_capability": "9.0",
        "precision": "fp16",
        "parts": "p",
        "graph": hashlib.sha256(b"graph").hexdigest(),
        "batches": "1, 2-8",
        "profiles": "x [1, 4] [1, 4] [1, 4]; x [2, 4] [8, 4] [8, 4]",
        "optimization_level": "3",
        "workspace": "all free memory",
        "builder": str(engine_index.BUILDER_REVISION),
    }


def test_equal_keys_have_no_differences() -> None:
    assert differences(KEY, key()) == ""


WIDER = (profile(1, 1, 5), profile(2, 8, 5))


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (key(target=replace(TARGET, tensorrt="11.4")),
         "built for TensorRT 10.16.0.72, now it is 11.4"),
        (key(target=replace(TARGET, gpu="NVIDIA L4")),
         "built for GPU NVIDIA H200, now it is NVIDIA L4"),
        (key(target=replace(TARGET, compute_capability=(8, 9))),
         "built for compute capability 9.0, now it is 8.9"),
        (key(target=replace(TARGET, precision="int8")),
         "built for precision fp16, now it is int8"),
        (key(graph=b"other"), "its graph has changed"),
        (key(parts="q"), "its graph has changed"),
        (key(graph=b"other", parts="q"), "its graph has changed"),
        (key(profiles=PROFILES[:1]), "built for batches 1, 2-8, now it is 1"),
        (key(profiles=WIDER), "the shapes of its profiles have changed"),
        (key(optimization_level=5), "built for optimization level 3, now it is 5"),
        (key(workspace_bytes=7), "built for workspace all free memory, now it is 7 bytes"),
        (key(graph=b"other", optimization_level=5),
         "its graph has changed, built for optimization level 3, now it is 5"),
        ({k: v for k, v in KEY.items() if k != "workspace"},
         "built for workspace all free memory, now it is nothing"),
    ],
)  # fmt: skip
def test_each_difference_is_said(now: dict[str, str], said: str) -> None:
    assert differences(KEY, now) == said


def test_our_own_way_of_building_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_index, "BUILDER_REVISION", 99)
    said = differences(KEY, key())
    assert said == f"built for Offramp's builder revision {KEY['builder']}, now it is 99"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimization_level": 6}, ("optimization level 6", "0 to 5")),
        ({"optimization_level": -1}, ("optimization level -1",)),
        ({"workspace_bytes": 0}, ("0 bytes", "positive")),
    ],
)
def test_settings_that_are_refused(settings: dict[str, int], said: Told) -> None:
    with pytest.raises(ValueError, match=facts(*said)):
        BuildSettings(precision="fp32", **settings)  # type: ignore[arg-type]
