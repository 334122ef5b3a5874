"""A copy is used where it is faster here; where none is, the bundle is of fp32, and says so."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.sliced import sliced

from offramp.bundle import CpuFeatures
from offramp.calibration.dataset import Dataset
from offramp.calibration.precision.choice import PrecisionChoice
from offramp.calibration.precision.kinds import CpuPrecision
from offramp.compiler import quantised_copy
from offramp.compiler.progress import SILENT
from offramp.compiler.quantised_copy import LEAST_AGREEMENT, fastest_copy

WITH_VNNI = CpuFeatures(machine="x86_64", names=("AVX512_VNNI", "AMX_INT8", "AVX512_BF16"))


def parts(train: int, tune: int) -> Any:
    def dataset(samples: int) -> Dataset:
        return Dataset(inputs={"x": np.arange(samples)}, labels=None, sha256="")

    return SimpleNamespace(train=dataset(train), tune=dataset(tune))


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    kind: CpuPrecision | None,
    tune: int,
    cpu: CpuFeatures = WITH_VNNI,
) -> tuple[bytes | None, dict[str, Any]]:
    """What is made of a choice, and what was asked."""
    asked: dict[str, Any] = {}

    def choose(graph: bytes, answer: str, calibration: Any, judged: Any, **more: Any) -> Any:
        asked.update(more, answer=answer, calibration=calibration, judged=judged)
        return PrecisionChoice(
            kind=kind,
            graph=b"copy",
            reason="why",
            measured=(),
            not_applicable={},
            disturbed=("noise",),
        )

    monkeypatch.setattr(quantised_copy, "choose_kind", choose)
    monkeypatch.setattr(quantised_copy, "cpu_features", lambda: cpu)
    options: Any = SimpleNamespace(reference_batch_size=16, threads=2)
    return fastest_copy(sliced("mlp").model, parts(1500, tune), options, SILENT), asked


def test_the_fastest_kind_is_the_copy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    copy, asked = chosen(monkeypatch, CpuPrecision.STATIC, tune=100)
    assert copy == b"copy"
    assert (len(asked["calibration"]), len(asked["judged"])) == (1000, 100)
    assert asked["batch_sizes"] == [1, 16]
    assert asked["least_agreement"] == LEAST_AGREEMENT
    assert asked["threads"] == 2
    assert caplog.messages == [
        "The CPU that int8 is made on: x86_64 with AVX512_VNNI, AMX_INT8, AVX512_BF16.",
        "The machine was disturbed while kinds of int8 were timed: noise.",
        "int8 on this machine is why.",
    ]


def test_where_no_kind_is_faster_there_is_no_copy_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copy, asked = chosen(monkeypatch, None, tune=10)
    assert copy is None
    assert len(asked["judged"]) == 16, "as many as a batch has"
    assert caplog.messages[-1] == (
        "PRECISION int8 BRINGS NOTHING HERE, the bundle will be of fp32: why."
    )


def test_a_cpu_whose_int8_saturates_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = CpuFeatures(machine="x86_64", names=("AVX2",))
    chosen(monkeypatch, CpuPrecision.STATIC, tune=100, cpu=old)
    (warning,) = (r for r in caplog.records if "VNNI" in r.message)
    assert warning.levelno == logging.WARNING
    assert warning.message.startswith("This CPU (x86_64 with AVX2) has no VNNI: sums of int8")
    assert warning.message.endswith("or with --precision fp32.")
    caplog.clear()
    for fine in (WITH_VNNI, CpuFeatures(machine="aarch64", names=None)):
        chosen(monkeypatch, CpuPrecision.STATIC, tune=100, cpu=fine)
    assert not any("VNNI:" in message for message in caplog.messages)
