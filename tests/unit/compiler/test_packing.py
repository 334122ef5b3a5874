"""An exit's results on the certify split are in the manifest; rewriting keeps all graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.bundles import sharing_weights
from tests.engines import engine_bundle
from tests.unit.bundle.examples import HEAD

from offramp.bundle import Bundle, BundleIntegrityError, Exit, ExitPolicy
from offramp.bundle.graph_weights import WEIGHTS
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.compiler.blueprints.packing import judged, rewrite

EXIT = Exit(
    index=1,
    file="exits/01.onnx",
    after_segment=0,
    inputs=("t",),
    output="answer",
    confidence="confidence",
    head=HEAD,
    agreement=0.0,
)


def records(labels: np.ndarray | None) -> ExitRecords:
    """Exit 1 agrees with the source model on 3 of 4 samples, and is right on 1."""
    return ExitRecords(
        confidence=np.ones((2, 4), np.float32),
        prediction=np.array([[9, 9, 9, 9], [0, 1, 2, 9]], np.int32),
        final_prediction=np.array([0, 1, 2, 3], np.int32),
        final_confidence=np.ones(4, np.float32),
        labels=labels,
    )


def test_agreement_and_accuracy_are_those_of_its_own_answers() -> None:
    exit_ = judged(EXIT, records(np.array([0, 7, 7, 7])))
    assert (exit_.agreement, exit_.accuracy) == pytest.approx((0.75, 0.25))


def test_without_labels_there_is_no_accuracy() -> None:
    exit_ = judged(EXIT, records(None))
    assert (exit_.agreement, exit_.accuracy) == (0.75, None)


def test_a_bundle_is_rewritten_with_its_file_of_weights(tmp_path: Path) -> None:
    held = engine_bundle("residual", tmp_path / "held.ee")
    bundle = sharing_weights(held, tmp_path / "named.ee")
    policy = ExitPolicy(version=7, active=())
    changed = {"report.html": b"new"}
    again = rewrite(
        bundle, tmp_path / "again.ee", bundle.manifest, policy, changed, overwrite=False
    )
    assert again.manifest.schema_version == 2
    before, after = ({e.path: e for e in b.manifest.files} for b in (bundle, again))
    for name in (*bundle.manifest.graphs, WEIGHTS):
        assert before[name] == after[name]
    assert again.read("report.html") == b"new"
    assert Bundle.open(tmp_path / "again.ee").policy == policy


def test_a_bundle_that_is_damaged_is_not_rewritten(tmp_path: Path) -> None:
    held = engine_bundle("residual", tmp_path / "held.ee")
    bundle = sharing_weights(held, tmp_path / "named.ee")
    content = (bundle.path / WEIGHTS).read_bytes()
    (bundle.path / WEIGHTS).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BundleIntegrityError, match=r"weights.bin was altered"):
        rewrite(bundle, tmp_path / "again.ee", bundle.manifest, bundle.policy, {}, overwrite=False)
    assert not (tmp_path / "again.ee").exists()
