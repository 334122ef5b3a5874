"""The self-check passes where all is well; each planted fault fails the check that is for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cuda_fakes import fake_cuda
from tests.engines import engine_bundle
from tests.golden.cases import BUNDLE as GOLDEN
from tests.marks import slow_but
from tests.unit.engine.self_check import faults

from offramp.bundle import Bundle
from offramp.engine.backends import Backend
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.errors import BackendError
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.self_check import CheckVerdict, SelfCheckReport, run_self_check
from offramp.engine.self_check.check_results import TimeLimit
from offramp.engine.self_check.subject import InputMaker
from offramp.engine.stages.plan import Mode, StageSpec

ROWS = 8
OF_MODELS = (
    "load", "answers", "carry", "confidence", "thresholds", "batch-mates", "select", "merge",
    "graphs", "slots", "restart", "memory",
)  # fmt: skip
ALL = {*OF_MODELS, "exit-check-kernel", "compaction-kernel", "close"}
ON_GPU = {"graphs", "exit-check-kernel", "compaction-kernel"}


@pytest.fixture(scope="module")
def residual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "residual.ee"
    engine_bundle("residual", path)
    return path


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "bert.ee"
    engine_bundle("bert", path)
    return path


def checked(
    backend: Backend, *bundles: Path, mode: Mode = Mode.AUDIT, **settings: Any
) -> SelfCheckReport:
    return run_self_check(
        {path.name.removesuffix(".ee"): path for path in bundles},
        EngineOptions(mode=mode, defaults=ModelOptions(max_batch_size=ROWS)),
        make=lambda _models, _options: backend,
        seconds=settings.pop("seconds", 0.2),
        **settings,
    )


def by_verdict(report: SelfCheckReport, verdict: CheckVerdict) -> set[str]:
    return {result.name for result in report.results if result.verdict is verdict}


def failed(report: SelfCheckReport) -> set[str]:
    return by_verdict(report, CheckVerdict.FAILED)


@pytest.mark.parametrize("mode", [Mode.AUDIT, Mode.LEAVE])
def test_all_is_well_with_onnx_runtime_on_the_committed_bundle(mode: Mode) -> None:
    report = checked(OnnxRuntimeBackend(), GOLDEN, mode=mode, seconds=2.0)
    assert failed(report) == set(), report.document()
    assert by_verdict(report, CheckVerdict.PASSED) == ALL - ON_GPU
    assert report.passed


def test_all_is_well_on_the_fake_driver(residual: Path, bert: Path) -> None:
    backend, _, driver = fake_cuda()
    report = checked(backend, GOLDEN, residual, bert, seconds=8.0)
    assert failed(report) == set(), report.document()
    assert by_verdict(report, CheckVerdict.PASSED) == ALL
    names = [(result.bundle, result.name) for result in report.results]
    assert {(b, n) for b in ("bundle", "residual", "bert") for n in OF_MODELS} <= set(names)
    assert driver.calls["launch_graph"] > 0
    assert not driver.misuses


def test_without_graphs_only_that_check_is_left_out(residual: Path) -> None:
    report = checked(fake_cuda(graphs=False)[0], residual)
    assert failed(report) == set(), report.document()
    assert by_verdict(report, CheckVerdict.SKIPPED) == {"graphs"}


def test_a_model_in_one_stage_has_no_rows_to_hand_on(residual: Path) -> None:
    report = checked(OnnxRuntimeBackend(), residual, mode=Mode.OFF)
    skipped = by_verdict(report, CheckVerdict.SKIPPED)
    assert skipped == {"carry", "thresholds", "select", "merge", *ON_GPU}
    assert report.passed


FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[Backend]], set[str]]] = {
    "answers beyond tolerance": (lambda: faults.of(faults.ReversesClasses), {"answers"}),
    "a carry beyond tolerance": (lambda: faults.of(faults.ScalesCarry), {"answers", "carry"}),
    "an answer depends on batch mates": (lambda: faults.of(faults.SpreadsNan), {"batch-mates"}),
    "sure of NaN": (lambda: faults.of(faults.IsSureOfNan), {"confidence"}),
    "> instead of >=": (faults.comparing_strictly, {"thresholds"}),
    "rows permuted": (lambda: faults.of(faults.PermutesRows), {"select"}),
    "a merge loses a row": (lambda: faults.of(faults.LosesARow), {"merge"}),
    "a slot does not synchronise": (faults.not_waiting, {"slots"}),
    "no recovery from a failure": (lambda: faults.of(faults.DoesNotRecover), {"restart"}),
    "memory leaks": (faults.leaking, {"memory"}),
    "a descriptor is not given back": (faults.keeping_descriptors, {"close"}),
    "a graph reads stale inputs": (faults.stale_graphs, {"graphs"}),
    "compaction is off by one": (faults.compaction_off_by_one, {"compaction-kernel"}),
    "the kernel compares with >": (
        faults.kernel_comparing_strictly, {"exit-check-kernel", "thresholds"},
    ),
    "device memory leaks": (faults.leaking_device, {"memory", "close"}),
    "a stream is not given back": (faults.streams_left_open, {"close"}),
}  # fmt: skip


@pytest.mark.parametrize("fault", slow_but(["> instead of >=", "rows permuted"], FAULTS))
def test_a_fault_fails_the_check_that_is_for_it(fault: str, residual: Path) -> None:
    planted, expected = FAULTS[fault]
    with planted() as backend:
        report = checked(backend, residual)
    # What a process holds, tests beside this one change as well.
    of_process = {"memory", "close"}
    assert expected <= failed(report) <= expected | of_process, report.summary()
    assert not report.passed
    assert not report.hangs
    assert all(r.reason for r in report.results if r.verdict is CheckVerdict.FAILED)


def test_a_kernel_that_is_sure_of_nan_fails_the_kernels_check() -> None:
    with faults.kernel_sure_of_nan() as backend:
        report = checked(backend, GOLDEN)  # integers, which are never NaN
    assert failed(report) == {"exit-check-kernel"}
    (result,) = [r for r in report.results if r.verdict is CheckVerdict.FAILED]
    assert "nan" in result.reason


def test_a_check_that_does_not_end_is_given_up(residual: Path) -> None:
    comes = threading.Event()
    kind = type("Never", (faults.NeverEnds,), {"comes": comes})
    report = checked(faults.SlotMaker(kind), residual, seconds=0.1, hang_timeout_s=5.0)
    comes.set()
    assert report.hangs
    assert failed(report) == {"answers"}
    skipped = [r for r in report.results if r.verdict is CheckVerdict.SKIPPED]
    assert {"memory", "close"} <= {r.name for r in skipped}
    assert {r.reason for r in skipped if r.name == "close"} == {"answers does not end"}


def test_a_bundle_that_cannot_be_loaded_does_not_hinder_others(residual: Path) -> None:
    class Refusing(OnnxRuntimeBackend):
        def prepare(self, spec: StageSpec) -> Any:
            if spec.bundle is not None and spec.bundle.path == residual:
                raise BackendError("there are no engines for it")
            return super().prepare(spec)

    report = checked(Refusing(), residual, GOLDEN)
    (load,) = [r for r in report.results if r.verdict is CheckVerdict.FAILED]
    assert (load.name, load.bundle, load.reason) == (
        "load", "residual", "there are no engines for it",
    )  # fmt: skip
    assert {r.bundle for r in report.results if r.name == "answers"} == {"bundle"}


def test_the_report_is_json_with_what_was_measured(residual: Path) -> None:
    lines: list[str] = []
    report = checked(fake_cuda()[0], residual, print_line=lines.append)
    document = json.loads(json.dumps(report.document()))
    assert document["passed"] is True
    assert document["environment"]["device"]["name"] == "Fake GPU"
    assert document["environment"]["packages"]["onnxruntime"]
    facts = {check["name"]: check["facts"] for check in document["checks"]}
    assert facts["answers"]["batch_sizes"] == [1, 2, 7, ROWS]
    assert facts["answers"]["largest_difference"] <= facts["answers"]["allowed"] == 1e-3
    assert facts["graphs"]["graphs"] > 0
    assert facts["thresholds"]["equal"] > 0
    assert facts["confidence"]["rows_without_number"] > 0
    assert lines[0] == "checking fake-cuda on Fake GPU"
    assert lines[-1] == "15 passed"
    assert len(lines) == len(document["checks"]) + 2


def test_what_is_no_number_is_text_in_the_report(residual: Path) -> None:
    with faults.of(faults.OverflowsAnswers) as backend:
        document = checked(backend, residual).document()
    text = json.dumps(document, allow_nan=False)
    facts = {check["name"]: check["facts"] for check in json.loads(text)["checks"]}
    assert facts["answers"]["largest_difference"] == "inf"


def test_inputs_are_those_that_the_model_takes(residual: Path, bert: Path) -> None:
    (image,) = InputMaker(Bundle.open(residual)).drawn(5).values()
    assert (image.shape, image.dtype) == ((5, 3, 16, 16), np.float32)
    words = InputMaker(Bundle.open(bert)).drawn(50)
    assert words["attention_mask"][:, 0].all()
    assert set(np.unique(words["attention_mask"])) == {0, 1}
    indices = InputMaker(Bundle.open(GOLDEN)).drawn(1000)["sample"]
    assert 0 <= indices.min() < 100
    assert 2300 < indices.max() < 2400  # the length of the tables in its graphs


def test_inputs_that_are_no_numbers_are_made_where_they_can_be(residual: Path) -> None:
    broken = InputMaker(Bundle.open(residual)).broken(2)
    assert broken is not None
    assert [str(row.reshape(-1)[0]) for row in broken["image"]] == ["nan", "inf"]
    assert InputMaker(Bundle.open(GOLDEN)).broken(2) is None


def test_the_first_case_is_run_whatever_the_time() -> None:
    now = iter([0.0, *[10.0] * 9])
    limit = TimeLimit(5.0, clock=lambda: next(now))
    assert list(limit.cases("abc")) == ["a"]
    assert limit.left_out == 2
