"""Engines built by TensorRT through the command line, and what they answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.bundle.engines import EngineStore, ShapeProfile, list_targets
from offramp.compiler.commands.cli import main
from offramp.compiler.common.errors import EngineBuildError
from offramp.compiler.engines.build_options import PARTS, BuildSettings
from offramp.compiler.engines.tensorrt_builder import TensorRTBuilder
from offramp.compiler.engines.units import UnitGraphs, units_of
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.engine.answers.differences import relative_difference
from offramp.engine.cuda.primary_context import primary_context
from offramp.engine.kernels.kernel_compilation import source_hash
from offramp.engine.tensorrt.lookup import TOLERANCES
from offramp.engine.tensorrt.standalone import StandaloneEngine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]

EXAMPLE_DATA = Path(__file__).parents[2] / "examples" / "fashion" / "calibration.npz"


def build(bundle: Path, *more: str) -> int:
    return main(["build", str(bundle), "--device", "cuda:0", *more])


def store_of(bundle: Path, precision: str = "fp32") -> EngineStore:
    (target,) = (t for t in list_targets(bundle) if t.precision == precision)
    return EngineStore.open(bundle, target)


@pytest.fixture
def builder() -> Iterator[TensorRTBuilder]:
    made = TensorRTBuilder("cuda:0")
    yield made
    made.close()


def inputs_of(
    bundle: Bundle, first_segment: int, batch: int, *, seed: int
) -> Mapping[str, NDArray[Any]]:
    """Return the model's inputs, and values computed from them up to a unit."""
    rng = np.random.default_rng(seed)
    values: dict[str, NDArray[Any]] = {}
    for spec in bundle.manifest.inputs:
        shape = (batch, *bundle.manifest.calibration.sample_shapes[spec.name])
        high = 256 if np.dtype(spec.dtype).kind == "u" else 2
        values[spec.name] = (
            rng.standard_normal(shape) if np.dtype(spec.dtype).kind == "f"
            else rng.integers(0, high, shape)
        ).astype(spec.dtype)  # fmt: skip
    for segment in bundle.manifest.segments[:first_segment]:
        values |= GraphRunner(onnx.load_from_string(bundle.read(segment.file))).run(values)
    return values


@pytest.mark.parametrize("batch_profiles", ["1,2-8,9-32", "1-16"])
def test_every_unit_is_built_and_agrees_within_every_profile(
    small: Path, batch_profiles: str
) -> None:
    assert build(small, "--batch-profiles", batch_profiles) == 0
    bundle, store = Bundle.open(small), store_of(small)
    units = units_of(bundle, PARTS)
    assert {entry.unit for entry in store.index.engines} == {unit.name for unit in units}
    graphs = UnitGraphs(bundle, "fp32", tensorrt_version=store.index.target.tensorrt)
    with primary_context(0).current():
        for unit in units:
            entry = store.entry(unit.name)
            assert entry is not None
            reference = GraphRunner(onnx.load_from_string(graphs.of(unit)))
            with StandaloneEngine(store.read(entry)) as engine:
                assert engine.profiles == len(entry.profiles) == batch_profiles.count(",") + 1
                for index, profile in enumerate(entry.profiles):
                    for batch in batches_of(profile):
                        values = inputs_of(bundle, unit.first_segment, batch, seed=batch)
                        inputs = {name: values[name] for name in reference.inputs}
                        found, wanted = engine.run(inputs, index), reference.run(inputs)
                        # A softmax passes on the absolute error of its logits.
                        largest = max(np.abs(value).max() for value in wanted.values())
                        allowed = TOLERANCES["fp32"] * max(1.0, float(largest))
                        assert found.keys() >= wanted.keys()
                        for name, value in wanted.items():
                            difference = relative_difference(found[name], value)
                            assert difference <= allowed, (unit.name, name, batch)


def batches_of(profile: ShapeProfile) -> set[int]:
    """Both ends and the middle: building checks the ends only."""
    first, last = profile.first_batch, profile.last_batch
    return {first, (first + last) // 2, last}


def test_what_is_fresh_is_not_built_again(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--parts", "source", "--batch-profiles", "1-4")
    assert build(small, *arguments) == 0
    (before,) = store_of(small).index.engines
    assert build(small, *arguments) == 0
    (after,) = store_of(small).index.engines
    assert after == before  # its measured build time, too
    said = capsys.readouterr()
    assert "fresh" in said.out + said.err


def test_another_profile_builds_again(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(small, "--parts", "source", "--batch-profiles", "1-4") == 0
    (before,) = store_of(small).index.engines
    capsys.readouterr()
    assert build(small, "--parts", "source", "--batch-profiles", "1-8") == 0
    (after,) = store_of(small).index.engines
    assert after.sha256 != before.sha256
    assert [profile.last_batch for profile in after.profiles] == [8]
    said = capsys.readouterr()
    assert "rebuilding" in said.out + said.err


def test_a_stage_is_built_while_serving_with_the_options_of_existing_engines(small: Path) -> None:
    assert build(small, "--parts", "segments", "--batch-profiles", "1,2-4") == 0
    before = store_of(small).index
    whole = f"00-{len(Bundle.open(small).manifest.segments) - 1:02d}"
    assert build(small, "--units", whole, "--while-serving") == 0
    after = store_of(small)
    (entry,) = (e for e in after.index.engines if e.unit == whole)
    assert [(p.first_batch, p.last_batch) for p in entry.profiles] == [(1, 1), (2, 4)]
    assert after.index.timing_cache == before.timing_cache
    assert len(after.index.engines) == len(before.engines) + 1


def test_auto_times_engines_on_the_device(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without data there is fp32 alone to choose from; it is timed all the same."""
    assert build(small, "--precision", "auto", "--batch-profiles", "1,2-8") == 0
    assert "fp32 is kept: predicted to save" in capsys.readouterr().err


def some_data(folder: Path) -> Path:
    """Return data that take seconds to run."""
    path = folder / "some.npz"
    with np.load(EXAMPLE_DATA) as archive:
        np.savez(path, **{name: archive[name][:1500] for name in archive.files})
    return path


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "int8"])
def test_the_example_in_every_precision(example: Path, tmp_path: Path, precision: str) -> None:
    """Building holds every profile against ONNX Runtime, and the answers against the promise."""
    arguments = ["--precision", precision, "--parts", "source,stages"]
    if precision in ("fp16", "int8"):  # the promise is measured elsewhere, here the engines
        arguments += ["--data", str(some_data(tmp_path)), "--accept-disagreement"]
    assert build(example, *arguments) == 0
    store = store_of(example, precision)
    bundle = Bundle.open(example)
    assert {entry.unit for entry in store.index.engines} == {
        unit.name for unit in units_of(bundle, ("source", "stages"))
    }
    kernels = store.read_kernels(source_hash())
    assert kernels is not None
    assert kernels[:4] == b"\x7fELF"


def test_dynamic_sequences_take_their_buckets(transformer: Path) -> None:
    symbols = [s for spec in Bundle.open(transformer).manifest.inputs for s in spec.shape[1:]]
    (symbol,) = {symbol for symbol in symbols if isinstance(symbol, str)}
    arguments = ("--batch-profiles", "1,2-4", "--buckets", f"{symbol}=8,16")
    assert build(transformer, *arguments) == 0
    assert all(len(entry.profiles) == 4 for entry in store_of(transformer).index.engines)


def test_a_graph_that_tensorrt_refuses_is_an_error_with_its_words(builder: TensorRTBuilder) -> None:
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 4])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 4])
    node = onnx.helper.make_node("NoSuchOperator", ["x"], ["y"])
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "g", [value], [result]),
        opset_imports=[onnx.helper.make_opsetid("", 17)],
        ir_version=8,
    )
    with pytest.raises(EngineBuildError, match="NoSuchOperator"):
        builder.build(
            model.SerializeToString(),
            [],
            BuildSettings(precision="fp32"),
            timing_cache=b"",
            progress=lambda *_: None,
        )


def test_a_plan_that_is_cut_off_is_an_error(builder: TensorRTBuilder) -> None:
    with pytest.raises(EngineBuildError, match="load"):
        builder.run(b"not an engine at all" * 100, {}, 0)
