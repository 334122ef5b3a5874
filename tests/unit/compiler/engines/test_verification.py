"""An engine is believed only after it computed what its graph does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from tests.engines import engine_bundle
from tests.facts import Told, facts
from tests.models import Builder
from tests.sliced import inputs_of, sliced

from offramp.bundle import Bundle
from offramp.calibration.data.dataset import Dataset
from offramp.compiler.common.errors import EngineBuildError
from offramp.compiler.engines.build_options import parse_batches, parse_buckets
from offramp.compiler.engines.engine_verification import Verifier
from offramp.compiler.engines.halving import halve
from offramp.compiler.engines.profiles import (
    ModelShapes,
    SizedProfile,
    profile_sizes,
    unit_profiles,
)
from offramp.compiler.engines.units import Unit, UnitGraphs
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.engine.tensorrt.lookup import TOLERANCES

Tensors = Mapping[str, NDArray[Any]]
WHOLE, MIDDLE = Unit(0, 5, None), Unit(2, 2, 1)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("bert")
    return engine_bundle("bert", folder / "b.ee", exits_after=(0, 2))


class Case:
    """A unit of a bundle, and an engine of it that may be made wrong."""

    def __init__(self, bundle: Bundle, unit: Unit, samples: Dataset | None = None) -> None:
        self.unit = unit
        self.graph = UnitGraphs(bundle, "fp32", tensorrt_version="10").of(unit)
        self.runner = GraphRunner(onnx.load_from_string(self.graph))
        sizes = profile_sizes(
            bundle.manifest, parse_batches("1,2-4"), parse_buckets(["sequence=8,20"])
        )
        shapes = ModelShapes(bundle)
        self.profiles: tuple[SizedProfile, ...] = unit_profiles(self.runner.inputs, sizes, shapes)
        self.verifier = Verifier(bundle, shapes, "fp32", samples=samples)
        self.calls: list[tuple[int, Tensors]] = []

    def check(self, alter: Any = lambda outputs: outputs) -> float:
        def run(inputs: Tensors, profile: int) -> Tensors:
            self.calls.append((profile, inputs))
            changed: Tensors = alter(dict(self.runner.run(inputs)))
            return changed

        return self.verifier.check(self.unit, self.graph, self.profiles, run)


def shapes_of(calls: list[tuple[int, Tensors]], name: str) -> list[tuple[int, tuple[int, ...]]]:
    return [(profile, inputs[name].shape) for profile, inputs in calls]


def test_every_profile_is_run_at_its_best_and_its_least_shapes(bert: Bundle) -> None:
    case = Case(bert, MIDDLE)
    assert case.check() == 0.0
    assert shapes_of(case.calls, "layer0/out") == [
        (0, (1, 8, 16)), (0, (1, 1, 16)), (1, (1, 20, 16)), (1, (1, 9, 16)),
        (2, (4, 8, 16)), (2, (2, 1, 16)), (3, (4, 20, 16)), (3, (2, 9, 16)),
    ]  # fmt: skip


def test_inputs_inside_the_model_are_real_activations(bert: Bundle) -> None:
    whole, middle = Case(bert, WHOLE), Case(bert, MIDDLE)
    whole.check()
    middle.check()
    _, model_inputs = whole.calls[0]
    _, unit_inputs = middle.calls[0]
    parts = [GraphRunner(segment.proto) for segment in sliced("bert").segments[:2]]
    values: dict[str, Any] = dict(model_inputs)
    for part in parts:
        values |= part.run(values)
    np.testing.assert_allclose(unit_inputs["layer0/out"], values["layer0/out"], atol=1e-5)
    np.testing.assert_array_equal(unit_inputs["attention_mask"], values["attention_mask"])


def test_token_ids_stay_inside_their_table(bert: Bundle) -> None:
    case = Case(bert, WHOLE)
    case.check()
    ids = np.concatenate([inputs["input_ids"].ravel() for _, inputs in case.calls])
    assert ids.dtype == np.int64
    assert ids.min() >= 0
    assert 10 < ids.max() < 50


def test_samples_are_used_where_they_are_long_enough(bert: Bundle) -> None:
    inputs = inputs_of(sliced("bert"), 3, seed=9)  # of length 16
    case = Case(bert, WHOLE, Dataset(inputs=inputs, labels=None, sha256="0"))
    case.check()
    by_shape = {feeds["input_ids"].shape: feeds["input_ids"] for _, feeds in case.calls}
    np.testing.assert_array_equal(by_shape[4, 8], inputs["input_ids"][[0, 1, 2, 0], :8])
    np.testing.assert_array_equal(by_shape[2, 9], inputs["input_ids"][:2, :9])
    assert by_shape[4, 20].shape == (4, 20)  # random


def altered(name: str, change: Any) -> Any:
    return lambda outputs: outputs | {name: change(outputs[name])}


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (altered("exit1/answer", lambda a: a + 0.02 * np.abs(a).max()),
         ("'exit1/answer'", '2.0e-02', '1.0e-03', 'profile 0, batch 1, sequence 8')),
        (altered("layer1/attended", lambda a: np.full_like(a, np.nan)), ('inf', 'nan')),
        (altered("layer1/attended", lambda a: a[:, :-1]),
         ('float32 [1, 7, 16]', 'float32 [1, 8, 16]')),
        (altered("layer1/attended", lambda a: a.astype(np.float16)),
         ('float16', 'graph is float32')),
        (lambda outputs: {"exit1/answer": outputs["exit1/answer"]},
         ("no output 'exit1/confidence'",)),
    ],
)  # fmt: skip
def test_what_an_engine_may_not_do(bert: Bundle, alter: Any, said: Told) -> None:
    with pytest.raises(EngineBuildError, match=facts(*said)):
        Case(bert, MIDDLE).check(alter)


def test_what_only_fails_in_another_profile_is_found(bert: Bundle) -> None:
    def wrong_when_long(outputs: dict[str, Any]) -> dict[str, Any]:
        answer = outputs["layer1/attended"]
        return outputs | {"layer1/attended": answer * (2 if answer.shape[:2] == (2, 9) else 1)}

    with pytest.raises(EngineBuildError, match=r"\(profile 3, batch 2, sequence 9\)"):
        Case(bert, MIDDLE).check(wrong_when_long)


def test_the_largest_difference_is_given(bert: Bundle) -> None:
    tiny = altered("layer1/attended", lambda a: a + 5e-4 * np.abs(a).max())
    assert Case(bert, MIDDLE).check(tiny) == pytest.approx(5e-4, rel=0.01)


@pytest.mark.parametrize(("magnitude", "allowed"), [(8.0, 8e-3), (0.25, 1e-3)])
def test_confidence_may_differ_by_what_its_logits_may(
    bert: Bundle, magnitude: float, allowed: float
) -> None:
    """Logits of magnitude m may be off by m times the tolerance, and the softmax passes it on."""
    wanted = {
        "exit1/answer": np.float32([[magnitude, -magnitude / 2, 0]]),
        "exit1/confidence": np.float32([0.9]),
        "layer1/attended": np.float32([[1]]),
    }

    def run(by: float) -> float:
        found = wanted | {"exit1/confidence": np.float32([0.9 * (1 + by)])}
        return Case(bert, MIDDLE).verifier._compare(MIDDLE, wanted, found, "profile 0")

    assert run(0.9 * allowed) == pytest.approx(0.9 * allowed, rel=0.01)
    with pytest.raises(EngineBuildError, match="exit1/confidence"):
        run(1.1 * allowed)


def test_an_engine_of_half_precision_is_held_against_true_float16(tmp_path: Path) -> None:
    """An engine overflows where float16 does; plain ONNX Runtime would not."""
    bundle, unit = engine_bundle("mlp", tmp_path / "b.ee"), Unit(0, 0, None)
    b = Builder()
    x = b.input("x", ["batch", 16])
    for factor in (6e4, 1e-4):
        x = b.node("Mul", x, b.constant(factor, np.float32))
    b.node("Clip", x, b.constant(-8.0, np.float32), b.constant(8.0, np.float32), out="y")
    b.output("y", ["batch", 16])
    graph = halve(b.build().SerializeToString())
    sizes = profile_sizes(bundle.manifest, parse_batches("4"), {})
    shapes = ModelShapes(bundle)
    verifier = Verifier(bundle, shapes, "fp16")
    profiles = unit_profiles(("x",), sizes, shapes)

    def truly(inputs: Tensors, _: int) -> Tensors:
        (x,) = inputs.values()
        with np.errstate(over="ignore"):
            y = x.astype(np.float16) * np.float16(6e4) * np.float16(1e-4)
        return {"y": np.clip(y, -8, 8).astype(np.float32)}

    assert verifier.check(unit, graph, profiles, truly) == 0.0
    unrounded = GraphRunner(onnx.load_from_string(graph))
    with pytest.raises(EngineBuildError, match="'y' of the engine differs"):
        verifier.check(unit, graph, profiles, lambda inputs, _: unrounded.run(inputs))


def test_a_graph_that_is_not_finite_is_not_blamed_on_the_engine(bert: Bundle) -> None:
    case = Case(bert, MIDDLE)
    wanted = {"layer1/attended": np.float32([[1, np.inf]])}
    with pytest.raises(EngineBuildError, match=r"itself is not finite .* finer --precision"):
        case.verifier._compare(Unit(2, 2, None), wanted, wanted, "profile 0")


def test_coarser_precisions_are_allowed_more() -> None:
    order = [TOLERANCES[p] for p in ("fp32", "tf32", "fp16", "int8")]
    assert order == sorted(set(order))


def test_probabilities_are_held_to_the_tolerance_itself(bert: Bundle) -> None:
    answer = replace(bert.manifest.answer, form="probabilities")
    probabilities = replace(bert, manifest=replace(bert.manifest, answer=answer))
    case = Case(probabilities, MIDDLE)
    with pytest.raises(EngineBuildError, match="exit1/confidence"):
        case.check(altered("exit1/confidence", lambda a: (a * 1.0014).astype(np.float32)))
