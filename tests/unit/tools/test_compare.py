"""``eebench compare``: what the bundle is compared with runs where the bundle runs."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console
from tests.cuda_fakes import fake_cuda
from tests.engines import engine_bundle
from tests.sliced import dataset_of, sliced

from offramp.bundle import Bundle, Promise
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.errors import BackendError
from offramp.engine.stages.pipeline import Departure
from offramp.engine.stages.plan import StageSpec
from offramp.tools.bench.common import compare as module
from offramp.tools.bench.common.compare import NO_EXIT, OFFRAMP, SOURCE, Row, baseline_of, compare
from offramp.tools.bench.compare_command import chance_of, print_rows

HOW: dict[str, Any] = {"threads": 1, "batch_sizes": (2, 4), "rounds": 2, "samples": 32}


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return engine_bundle("mlp", tmp_path / "mlp.ee")


def test_on_a_gpu_the_source_model_is_a_stage_of_the_same_backend(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a session on the CPU was made")

    monkeypatch.setattr(module, "PlainModel", never)
    whole: list[int] = []

    def note(spec: StageSpec, rows: int) -> None:
        if spec.first_segment == 0 and spec.last_segment == len(bundle.manifest.segments) - 1:
            whole.append(rows)

    backend, _, driver = fake_cuda(on_enqueue=note)
    rows = compare(bundle, backend, dataset_of(sliced("mlp"), 32), **HOW)
    backend.close()
    assert [(row.system, row.batch_size) for row in rows] == [
        (name, size) for size in (2, 4) for name in (SOURCE, OFFRAMP, NO_EXIT)
    ]
    assert set(whole) == {1, 2, 3, 4}
    assert all(row.agreement == 1.0 for row in rows if row.system != OFFRAMP)
    assert driver.calls["launch_graph"] > 0
    assert baseline_of(backend, 1) == "the source model as one session of fake-cuda"


def test_on_the_cpu_it_is_a_plain_session(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, prepared = OnnxRuntimeBackend(), []
    prepare = backend.prepare

    def note(spec: StageSpec) -> Any:
        prepared.append((spec.first_segment, spec.last_segment))
        return prepare(spec)

    monkeypatch.setattr(backend, "prepare", note)
    rows = compare(bundle, backend, dataset_of(sliced("mlp"), 32), **HOW)
    assert {row.system for row in rows} == {SOURCE, OFFRAMP, NO_EXIT}
    assert (0, len(bundle.manifest.segments) - 1) not in prepared
    assert baseline_of(backend, 1) == "plain ONNX Runtime session on the CPU, 1 thread"
    assert baseline_of(backend, 4).endswith("4 threads")


def test_further_systems_are_measured_along(bundle: Bundle) -> None:
    class Constant:
        """Answers the first class, always."""

        def run(self, tensors: Mapping[str, NDArray[Any]]) -> Iterator[Departure]:
            rows = len(next(iter(tensors.values())))
            answer = np.eye(1, 3).repeat(rows, axis=0)
            yield Departure(0, np.arange(rows), answer, np.empty(0, np.float32))

        def warm_up(self, tensors: Mapping[str, NDArray[Any]]) -> None:
            assert len(next(iter(tensors.values()))) <= 4

    rows = compare(
        bundle,
        OnnxRuntimeBackend(),
        dataset_of(sliced("mlp"), 32),
        **HOW,
        others={"constant": Constant()},
    )
    constant = [row for row in rows if row.system == "constant"]
    assert len(constant) == 2
    assert all(row.exit_shares == {"final": 1.0} for row in constant)
    assert all(row.agreement < 1 for row in constant)


def test_the_slot_is_closed_also_after_an_error(bundle: Bundle) -> None:
    def refuse(spec: StageSpec, rows: int) -> None:
        raise BackendError(f"stage {spec.index} will not have {rows} rows")

    backend, _, _ = fake_cuda(on_enqueue=refuse)
    with pytest.raises(BackendError, match="will not have"):
        compare(bundle, backend, dataset_of(sliced("mlp"), 32), **HOW)
    backend.close()  # refuses while slots are open


def test_the_table_says_what_it_compares_with() -> None:
    row = Row(
        system=SOURCE, batch_size=1, mean_ms=1.0, median_ms=1.0, p95_ms=1.0, p99_ms=1.0,
        busy_ms_per_sample=1.0, agreement=1.0, accuracy=None, exit_shares={},
    )  # fmt: skip
    said = io.StringIO()
    print_rows(Console(file=said, width=200), [row], title="t", baseline="one engine of x")
    assert "×ratio to source (one engine of x)" in " ".join(said.getvalue().split())


def test_the_agreement_is_shown_with_what_chance_makes_of_it() -> None:
    row = Row(
        system=OFFRAMP, batch_size=1, mean_ms=1.0, median_ms=1.0, p95_ms=1.0, p99_ms=1.0,
        busy_ms_per_sample=1.0, agreement=0.9885, accuracy=None, exit_shares={},
    )  # fmt: skip
    promise = Promise(
        max_disagreement=0.01, confidence_level=0.95, certify_samples=2000, certify_errors=10,
        p_value=0.01, predicted_savings=0.6,
    )  # fmt: skip
    none = chance_of(promise, [replace(row, agreement=1.0)], 50)
    assert none.startswith(
        "0 of 50 samples were answered differently; of all samples like them, up to 5.8% may be. "
    )
    said = chance_of(promise, [row], 2000)
    assert said.startswith("On 2,000 samples chance moves agreement by ±0.5 points. The promise, ")
    assert "disagreement of at most 0.01" in said


def test_another_clock_measures_all_systems(bundle: Bundle) -> None:
    ticks = itertools.count()
    backend = OnnxRuntimeBackend(threads=1)
    rows = compare(
        bundle, backend, dataset_of(sliced("mlp"), 32), **HOW, clock=lambda: float(next(ticks))
    )
    backend.close()
    # started, one answer, all answered: two ticks of a second each, for a batch of the source model
    assert [r.busy_ms_per_sample for r in rows if r.system == SOURCE] == [1000.0, 500.0]
