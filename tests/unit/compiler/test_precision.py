"""A copy is used where it saves more here than exits alone; where none does, it is fp32."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.facts import tells
from tests.sliced import sliced

from offramp.bundle import CpuFeatures
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.precision.choice import PrecisionChoice
from offramp.calibration.precision.kinds import CpuPrecision, Mix
from offramp.calibration.precision.quantised_graphs import PrecisionError
from offramp.compiler.blueprints import precision_choice
from offramp.compiler.blueprints.precision_choice import LEAST_AGREEMENT, choose_precision
from offramp.compiler.common.errors import VerificationError
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.common.progress import SILENT

NOTHING = "PRECISION int8 BRINGS NOTHING HERE, the bundle will be of fp32: "


WITH_VNNI = CpuFeatures(machine="x86_64", names=("AVX512_VNNI", "AMX_INT8", "AVX512_BF16"))


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The used part of a blueprint."""

    copy: bytes
    sliced: Any
    timed: Any
    predicted_savings: float
    candidates: Any
    path: Any
    choice: Any
    reason: str = ""


def options(precision: str) -> CompileOptions:
    return CompileOptions.of(
        model=Path(), data=Path(), output=Path(),
        precision=precision, reference_batch_size=16, threads=2,
    )  # fmt: skip


class Bench:
    """Measurements of copies, and the requested precision."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, asked: str, tune: int = 100) -> None:
        self.kinds: dict[str, Any] = {}
        self.saturating: list[bool] = []
        self.kept: set[str] = set()
        self.kind: CpuPrecision | None = CpuPrecision.STATIC
        self.graphs = {CpuPrecision.STATIC: b"whole"}
        self.mix: Mix | None = None
        self.cpu = WITH_VNNI
        self.reason = ""
        self.predicted = {b"float32": 0.5, b"whole": 0.7, b"mixed": 0.8}
        self.run: Any = SimpleNamespace(
            options=options(asked),
            parts=SimpleNamespace(train=dataset(1500), tune=dataset(tune)),
            progress=SILENT,
        )
        monkeypatch.setattr(precision_choice, "cpu_features", lambda: self.cpu)
        monkeypatch.setattr(precision_choice, "choose_kind", self.choose_kind)
        monkeypatch.setattr(precision_choice, "best_mix", lambda *_, **__: self.mix)
        monkeypatch.setattr(precision_choice, "quantise", self.quantise)
        monkeypatch.setattr(precision_choice, "on_copy", lambda _p, _e, copy: self.blueprint(copy))

    def choose_kind(
        self, graph: bytes, answer: str, calibration: Any, judged: Any, **more: Any
    ) -> Any:
        self.saturating.append(more["saturating"])
        self.kinds.update(more, answer=answer, calibration=calibration, judged=judged)
        measured: Any = [SimpleNamespace(kind=kind, describe=lambda: "why") for kind in self.graphs]
        return PrecisionChoice(
            kind=self.kind,
            reason="why",
            measured=measured,
            not_applicable={},
            disturbed=("noise",),
            graphs=self.graphs,
            saturating=more["saturating"],
        )

    def quantise(self, graph: bytes, data: Any, kind: Any, *, kept: Any, **more: Any) -> bytes:
        if self.mix == Mix(0, 1):
            raise PrecisionError("nothing there")
        self.kept = kept
        assert more["saturating"] == self.saturating[-1]
        return b"mixed"

    def blueprint(self, copy: bytes) -> Any:
        if copy == b"bad":
            raise VerificationError("its pieces differ")
        pieces = sliced("mlp")
        cuts = [SimpleNamespace(name=precision_choice.PREFIX + c.name) for c in pieces.cuts]
        front = SimpleNamespace(cuts=[*cuts, SimpleNamespace(name="own")])
        return Drawn(
            copy=copy,
            timed=SimpleNamespace(run=self.run),
            sliced=pieces if copy == b"float32" else front,
            predicted_savings=self.predicted[copy],
            candidates=None,
            path=SimpleNamespace(active=(0,)),
            choice=SimpleNamespace(cost=lambda size: size),
        )

    def chosen(self) -> bytes:
        found: Any = choose_precision(self.blueprint(b"float32"), ())
        copy: bytes = found.copy
        self.reason = found.reason
        return copy


def dataset(samples: int) -> Dataset:
    return Dataset(inputs={"x": np.arange(samples)}, labels=None, sha256="")


def test_the_fastest_kind_is_the_copy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(monkeypatch, asked="int8")
    assert bench.chosen() == b"whole"
    asked = bench.kinds
    assert (len(asked["calibration"]), len(asked["judged"])) == (1000, 100)
    assert asked["batch_sizes"] == [1, 16]
    assert asked["least_agreement"] == LEAST_AGREEMENT
    assert asked["threads"] == 2
    assert caplog.messages == [
        "The int8 copy is made on this CPU: x86_64 with AVX512_VNNI, AMX_INT8, AVX512_BF16.",
        "The machine was disturbed while the kinds of int8 copies were timed: noise.",
        (
            "Precision int8: why; "
            "exits alone are predicted to save 50.0% of its time, with int8 70.0%."
        ),
    ]


def test_as_many_samples_are_judged_as_a_batch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, asked="int8", tune=10)
    bench.chosen()
    assert len(bench.kinds["judged"]) == 16


@pytest.mark.parametrize("asked", ["int8", "auto"])
def test_where_no_kind_is_faster_there_is_no_copy(
    asked: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(monkeypatch, asked=asked)
    bench.kind = None
    assert bench.chosen() == b"float32"
    told = caplog.records[-1]
    wanted = (
        (logging.WARNING, f"{NOTHING}why.")
        if asked == "int8"
        else (logging.INFO, "Precision fp32: why.")
    )
    assert (told.levelno, told.message) == wanted


def test_where_exits_alone_save_as_much_there_is_no_copy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(monkeypatch, asked="int8")
    bench.predicted[b"whole"] = 0.505
    assert bench.chosen() == b"float32"
    assert caplog.messages[-1] == (
        f"{NOTHING}exits alone are predicted to save 50.0% of its time, with int8 50.5% (why)."
    )


def test_a_mix_is_used_where_it_saves_more(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, asked="auto")
    bench.mix = Mix(1, 3)
    assert bench.chosen() == b"mixed"
    assert bench.reason == (
        "why; int8 in segments 1 to 2, float32 in the others; exits alone are predicted to save "
        "50.0% of its time, with int8 80.0%"
    )
    segments = sliced("mlp").segments
    given = [{n for node in s.proto.graph.node for n in node.output} for s in segments]
    assert given[0] <= bench.kept
    assert bench.kept.isdisjoint(given[1] | given[2])
    bench.predicted[b"mixed"] = 0.6  # measured, it saves less than was predicted by parts
    assert bench.chosen() == b"whole"


def test_the_kind_that_agrees_most_is_tried_beside_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Disagreements of a copy reduce those left for exits: so it may save less."""
    bench = Bench(monkeypatch, asked="auto")
    bench.graphs = {
        CpuPrecision.STATIC: b"whole",
        CpuPrecision.ROWS: b"between",
        CpuPrecision.BLOCKS: b"agreeing",
    }
    bench.predicted[b"agreeing"] = 0.75
    assert bench.chosen() == b"agreeing"
    bench.predicted[b"agreeing"] = 0.65
    assert bench.chosen() == b"whole"


def test_a_mix_with_nothing_to_quantise_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, asked="auto")
    bench.mix = Mix(0, 1)
    assert bench.chosen() == b"whole"


def test_a_cpu_whose_int8_saturates_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(monkeypatch, asked="auto")
    bench.cpu = CpuFeatures(machine="x86_64", names=("AVX2",))
    bench.chosen()
    (warning,) = (r for r in caplog.records if "VNNI" in r.message)
    assert warning.levelno == logging.WARNING
    tells(warning.message, "x86_64 with AVX2", "VNNI", "int8")
    assert warning.message.endswith("To compile for CPUs with VNNI, compile on such a CPU.")
    assert bench.saturating == [True]
    caplog.clear()
    for fine in (WITH_VNNI, CpuFeatures(machine="aarch64", names=None)):
        bench.cpu = fine
        bench.chosen()
    assert not any("has no VNNI" in message for message in caplog.messages)
    assert bench.saturating == [True, False, False]


def test_a_copy_that_cannot_be_cut_is_left_out_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(monkeypatch, asked="auto")
    bench.graphs = {CpuPrecision.STATIC: b"bad", CpuPrecision.ROWS: b"whole"}
    assert bench.chosen() == b"whole"
    tells(caplog.text, "int8-static", "pieces differ")
    bench.graphs = {CpuPrecision.STATIC: b"bad"}
    assert bench.chosen() == b"float32"
    assert bench.reason == "no copy can be cut (why)"
    bench.run.options = options("int8")
    with pytest.raises(VerificationError, match="its pieces differ"):
        bench.chosen()
