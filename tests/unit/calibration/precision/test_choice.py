"""The choice of a kind from what was measured: times are given here, all else is real."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from tests.facts import facts, tells
from tests.models import residual_cnn
from tests.unit.calibration.precision.graphs_to_quantise import (
    SATURATES,
    convolved_and_multiplied,
    dataset,
    inputs,
    serialised,
)

from offramp.calibration.data.dataset import Dataset
from offramp.calibration.precision import choice
from offramp.calibration.precision.choice import KindMeasured, PrecisionChoice, choose_kind
from offramp.calibration.precision.kinds import CpuPrecision, quantise
from offramp.calibration.precision.quantised_graphs import BatchDependence
from offramp.engine.common.timing import Effort, Estimate

STATIC, SIGNED, ROWS = CpuPrecision.STATIC, CpuPrecision.SIGNED, CpuPrecision.ROWS
Ratios = Mapping[CpuPrecision, tuple[float, float]]


def estimated(value: float, half_width: float = 0.01) -> Estimate:
    return Estimate(value=value, half_width=half_width, rounds=8)


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    ratios: Ratios,
    *,
    graph: bytes | None = None,
    least_agreement: float = 0.5,
    **changed: Any,
) -> PrecisionChoice:
    """Return the choice for these shares of float32's time at batches of 1 and 16."""

    def timed(
        *_: Any, kind: CpuPrecision, **__: Any
    ) -> tuple[dict[int, Estimate], tuple[str, ...]]:
        return dict(zip((1, 16), map(estimated, ratios[kind]), strict=True)), ("busy",)

    monkeypatch.setattr(choice, "_time", timed)
    graph = graph or convolved_and_multiplied()
    return choose_kind(
        graph,
        onnx.ModelProto.FromString(graph).graph.output[0].name,
        dataset(inputs(graph, 32, seed=1)),
        dataset(inputs(graph, 40, seed=2)),
        threads=1,
        least_agreement=least_agreement,
        saturating=SATURATES,
        kinds=list(ratios),
        **changed,
    )


def test_the_fastest_kind_is_chosen_with_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen(monkeypatch, {STATIC: (0.5, 0.5), ROWS: (0.4, 0.4), SIGNED: (0.9, 0.9)})
    graph = convolved_and_multiplied()
    given = dataset(inputs(graph, 32, seed=1))
    assert found.kind is ROWS
    assert found.graphs[ROWS] == quantise(graph, given, ROWS, threads=1, saturating=SATURATES)
    assert found.reason.startswith("int8-rows: 0.40 ± 0.01 at batch 1, 0.40 ± 0.01 at batch 16 of")
    assert [m.kind for m in found.measured] == [STATIC, ROWS, SIGNED]
    assert all(m.samples == 40 and m.size_bytes > 0 for m in found.measured)
    assert found.disturbed == ("busy",) * 3


def test_slower_kinds_are_kept_where_they_agree_more_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told(kind: CpuPrecision, ratio: float, agreement: float) -> tuple[KindMeasured, bytes]:
        measured = KindMeasured(
            kind=kind,
            ratios={1: Estimate(value=ratio, half_width=0.01, rounds=9)},
            agreement=agreement,
            samples=100,
            dependence=BatchDependence(rows=16, changed=0, difference=0.0),
            size_bytes=1,
        )
        return measured, kind.value.encode()

    fine = [told(SIGNED, 0.7, 0.99), told(STATIC, 0.4, 0.98), told(ROWS, 0.5, 0.97)]
    kept = [measured.kind for measured, _ in choice._undominated(fine)]
    assert kept == [STATIC, SIGNED]
    assert choice._undominated([]) == []
    found = chosen(monkeypatch, {STATIC: (0.5, 0.5), ROWS: (0.4, 0.4)})
    assert found.kind is not None
    assert next(iter(found.graphs)) is found.kind


def test_speed_is_the_mean_over_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, {STATIC: (0.9, 0.4), ROWS: (0.5, 0.5)}).kind is ROWS
    assert chosen(monkeypatch, {STATIC: (0.7, 0.3), ROWS: (0.5, 0.5)}).kind is STATIC


def test_float32_stays_where_nothing_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen(monkeypatch, {STATIC: (1.4, 1.3), ROWS: (1.0, 1.02)})
    assert found.kind is None
    assert found.graphs == {}
    tells(found.reason, "int8-rows", "1.02 ± 0.01", "16", "int8-static", "1.40 ± 0.01", "batch 1")


def test_a_kind_that_does_not_agree_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen(monkeypatch, {STATIC: (0.5, 0.5)}, least_agreement=1.01)
    assert found.kind is None
    assert "int8-static: agrees with float32 on" in found.reason
    assert "of 40 samples, less than 101.00%" in found.reason


def test_a_kind_that_depends_on_batch_mates_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def dependent(*_: Any, **__: Any) -> BatchDependence:
        return BatchDependence(rows=16, changed=1, difference=0.117)

    monkeypatch.setattr(choice, "depends_on_batch_mates", dependent)
    found = chosen(monkeypatch, {STATIC: (0.5, 0.5)})
    assert found.kind is None
    tells(found.reason, "batch mates", "11.7%")


def test_kinds_that_have_nothing_to_do_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = serialised(residual_cnn())
    found = chosen(monkeypatch, {ROWS: (0.1, 0.1), STATIC: (0.5, 0.5)}, graph=graph)
    assert found.kind is STATIC
    assert "int8-rows is for Gemm, MatMul" in found.not_applicable[ROWS]
    none = chosen(monkeypatch, {ROWS: (0.1, 0.1)}, graph=graph)
    assert none.kind is None
    tells(none.reason, "float32 stays", "int8-rows", "Gemm, MatMul")


def test_a_kind_that_does_not_run_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_tomorrow(graph: bytes, *_: Any, **__: Any) -> bytes:
        proto = onnx.ModelProto.FromString(graph)
        proto.graph.node[0].op_type = "ConvOfTomorrow"
        return serialised(proto)

    monkeypatch.setattr(choice, "quantise", of_tomorrow)
    found = chosen(monkeypatch, {STATIC: (0.1, 0.1)})
    assert found.kind is None
    tells(found.not_applicable[STATIC], "int8-static", "ONNX Runtime")
    assert "ConvOfTomorrow" in found.reason


def test_every_kind_counts_as_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    graph = serialised(residual_cnn())
    ratios = {ROWS: (0.5, 0.5), STATIC: (0.5, 0.5)}
    chosen(monkeypatch, ratios, graph=graph, progress=done.append)
    assert done == [1, 1]


def test_fewer_samples_than_a_batch_are_refused() -> None:
    graph = convolved_and_multiplied()
    few: Dataset = dataset(inputs(graph, 15))
    with pytest.raises(ValueError, match=facts("15 samples", "expected", "(16)", "more")):
        choose_kind(graph, "y", few, few, threads=1, saturating=SATURATES, least_agreement=0.9)


def test_kinds_are_timed_beside_float32() -> None:
    graph = convolved_and_multiplied()
    given = dataset(inputs(graph, 16))
    effort = Effort(least=3, most=3)
    found = choose_kind(
        graph,
        "y",
        given,
        given,
        threads=1,
        saturating=SATURATES,
        least_agreement=0,
        kinds=[STATIC],
        effort=effort,
    )
    (measured,) = found.measured
    assert measured.ratios.keys() == {1, 16}
    assert measured.ratios[16].rounds == 3
    assert measured.ratios[1].rounds == 3 * 4  # short ones more often
    assert all(ratio.value > 0 for ratio in measured.ratios.values())


MEASURED = KindMeasured(
    kind=STATIC,
    ratios={1: estimated(0.5), 16: estimated(0.5)},
    agreement=0.99,
    samples=500,
    dependence=BatchDependence(rows=16, changed=0, difference=0.0),
    size_bytes=1,
)


@pytest.mark.parametrize(
    ("at_one", "at_sixteen", "objection"),
    [
        (estimated(0.5), estimated(0.94, 0.005), None),
        (estimated(0.5), estimated(0.94, 0.02), "not faster: ratio 0.94 ± 0.02 at batch 16"),
        (estimated(1.02, 0.03), estimated(0.5), None),  # slower for all that is known: not enough
        (estimated(1.05, 0.03), estimated(0.5), "not faster: ratio 1.05 ± 0.03 at batch 1"),
    ],
)
def test_intervals_count(at_one: Estimate, at_sixteen: Estimate, objection: str | None) -> None:
    found = replace(MEASURED, ratios={1: at_one, 16: at_sixteen}).objection(0.98)
    assert (found or "").startswith(objection or "")
    assert (found is None) == (objection is None)


def test_an_answer_that_is_no_number_is_an_objection() -> None:
    wrong = BatchDependence(rows=16, changed=0, difference=np.nan)
    found = replace(MEASURED, dependence=wrong).objection(0.98) or ""
    assert found.startswith("answers depend on batch mates")
