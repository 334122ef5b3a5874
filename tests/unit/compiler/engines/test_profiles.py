"""Shape profiles: of which shapes an engine is built for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.engines import engine_bundle
from tests.facts import tells
from tests.sliced import inputs_of, sliced

from offramp.bundle import Bundle
from offramp.bundle.engines import ShapeRange
from offramp.compiler.common.errors import EngineOptionsError
from offramp.compiler.engines.build_options import SizeRange, parse_batches, parse_buckets
from offramp.compiler.engines.profiles import (
    ModelShapes,
    Point,
    Sizes,
    profile_notes,
    profile_sizes,
    symbols_of,
    unit_profiles,
)
from offramp.compiler.graphs.runtime import GraphRunner

BATCHES = parse_batches("1,2-8")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return engine_bundle("bert", tmp_path_factory.mktemp("bert") / "b.ee")


@pytest.fixture(scope="module")
def residual(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return engine_bundle("residual", tmp_path_factory.mktemp("residual") / "b.ee")


def sizes_of(bundle: Bundle, *buckets: str) -> tuple[Sizes, ...]:
    return profile_sizes(bundle.manifest, BATCHES, parse_buckets(buckets))


def test_a_model_of_fixed_shapes_has_a_profile_a_batch_range(residual: Bundle) -> None:
    assert symbols_of(residual.manifest) == {}
    found = unit_profiles(["block0"], sizes_of(residual), ModelShapes(residual))
    assert [p.shapes.inputs for p in found] == [
        {"block0": ShapeRange(least=(n, 8, 16, 16), best=(m, 8, 16, 16), most=(m, 8, 16, 16))}
        for n, m in ((1, 1), (2, 8))
    ]
    assert [(p.shapes.first_batch, p.shapes.last_batch) for p in found] == [(1, 1), (2, 8)]


def test_buckets_of_a_sequence_reach_the_tensors_between_segments(bert: Bundle) -> None:
    sizes = sizes_of(bert, "sequence=8,20")
    found = unit_profiles(["layer0/out", "attention_mask"], sizes, ModelShapes(bert))
    ranges = [p.shapes.inputs for p in found]
    assert ranges == [
        {
            "layer0/out": ShapeRange(least=(n, s, 16), best=(m, t, 16), most=(m, t, 16)),
            "attention_mask": ShapeRange(least=(n, s), best=(m, t), most=(m, t)),
        }
        for n, m in ((1, 1), (2, 8))
        for s, t in ((1, 8), (9, 20))
    ]


def test_without_buckets_a_sequence_goes_up_to_the_calibrated_one(bert: Bundle) -> None:
    assert symbols_of(bert.manifest) == {"sequence": SizeRange(1, 16)}
    sizes = sizes_of(bert)
    assert [s.others for s in sizes] == [{"sequence": (1, 16)}] * 2
    (note,) = profile_notes(bert.manifest, sizes, {})
    tells(note, "sequence", "1-16", "--buckets sequence=SIZES")


def test_given_buckets_need_no_note_but_many_profiles_do(bert: Bundle) -> None:
    buckets = parse_buckets(["sequence=1,2,3,4,5,6,7,8,9"])
    sizes = profile_sizes(bert.manifest, BATCHES, buckets)
    (note,) = profile_notes(bert.manifest, sizes, buckets)
    assert note.startswith("18 profiles an engine are many")
    assert profile_notes(bert.manifest, sizes[:16], buckets) == []


def test_a_bucket_of_a_size_that_the_model_does_not_have(bert: Bundle, residual: Bundle) -> None:
    with pytest.raises(EngineOptionsError, match=r"no symbolic size 'width'.*it has sequence"):
        sizes_of(bert, "width=8")
    with pytest.raises(EngineOptionsError, match="'batch' besides the batch; it has none"):
        sizes_of(residual, "batch=8")


def test_a_profile_that_a_unit_does_not_tell_apart_is_there_once(bert: Bundle) -> None:
    found = unit_profiles(["logits"], sizes_of(bert, "sequence=8,20"), ModelShapes(bert))
    assert [p.shapes.inputs["logits"].most for p in found] == [(1, 3), (8, 3)]
    assert [p.sizes.others["sequence"] for p in found] == [(1, 8), (1, 8)]


@pytest.mark.parametrize("name", ["residual", "bert", "bert with types", "towers", "conditional"])
def test_shapes_are_those_of_a_run(name: str, tmp_path: Path) -> None:
    bundle = engine_bundle(name, tmp_path / "b.ee", exits_after=(), active=())
    shapes = ModelShapes(bundle).at(Point(5, tuple((s, 16) for s in symbols_of(bundle.manifest))))
    values: dict[str, Any] = inputs_of(sliced(name), 5)
    for segment in sliced(name).segments:
        values |= GraphRunner(segment.proto).run(values)
    assert shapes == {name: value.shape for name, value in values.items()}


@pytest.mark.parametrize("size", [65, 100])
def test_sizes_at_which_the_model_fails(bert: Bundle, size: int) -> None:
    """It has 64 places."""
    shapes = ModelShapes(bert)
    assert shapes.at(Point(1, (("sequence", 64),)))["layer0/out"] == (1, 64, 16)
    with pytest.raises(EngineOptionsError) as refused:
        shapes.at(Point(1, (("sequence", size),)))
    tells(str(refused.value), f"sequence {size}")
    assert "--buckets NAME=SIZES" in str(refused.value)


def test_the_model_is_run_once_for_all_batches(
    bert: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = ModelShapes(bert)
    runs = []

    def counted(runner: GraphRunner, feeds: Mapping[str, Any]) -> Any:
        runs.append(feeds)
        return run(runner, feeds)

    run = GraphRunner.run
    monkeypatch.setattr(GraphRunner, "run", counted)
    unit_profiles(["layer0/out"], sizes_of(bert, "sequence=8,20"), shapes)
    assert sorted(feeds["input_ids"].shape for feeds in runs) == [(2, 1), (2, 8), (2, 9), (2, 20)]
