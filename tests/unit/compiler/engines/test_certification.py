"""The promise in the precision of engines: what the model's end spends, and what exits get."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests import models
from tests.bundles import compile_tiny, equal_times

from offramp.bundle import ActiveExit, Bundle, ExitPolicy, Promise
from offramp.bundle.engines import Precision
from offramp.bundle.records import CERTIFY, TUNE
from offramp.calibration.data.dataset import Dataset, read_dataset
from offramp.certify import evaluate
from offramp.certify.binomial import allowed_errors, upper_bound
from offramp.compiler.common.errors import VerificationError
from offramp.compiler.engines.engine_verification import (
    PrecisionData,
    Recertified,
    certify_engines,
    measure_precision,
    part_data,
)
from offramp.compiler.engines.units import ranges_of

PROMISE = Promise(
    max_disagreement=0.2,
    confidence_level=0.95,
    certify_samples=1000,
    certify_errors=170,
    p_value=0.01,
    predicted_savings=0.2,
)
"""Wide: these exits are of noise, and shall leave at all."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, PrecisionData]:
    folder = tmp_path_factory.mktemp("compiled")
    x = np.random.default_rng(0).standard_normal((4000, 16)).astype(np.float32)
    with equal_times():
        bundle = compile_tiny(models.mlp(), {"x": x}, folder, epochs=4, seed=7)
    data = read_dataset(folder / "data.npz", bundle.manifest.inputs)
    active = tuple(ActiveExit(exit=e.index, threshold=0.9) for e in bundle.manifest.exits)
    policy = ExitPolicy(version=3, active=active, promise=PROMISE)
    return replace(bundle, policy=policy), part_data(bundle, data, seed=7)


def certified(compiled: tuple[Bundle, PrecisionData], precision: Precision) -> Recertified:
    bundle, parts = compiled
    ranges = ranges_of(bundle, parts.ranges, threads=1)
    return certify_engines(bundle, precision, ranges, parts)


def test_the_tune_split_is_that_of_the_compilation(compiled: tuple[Bundle, PrecisionData]) -> None:
    bundle, parts = compiled
    again = certified(compiled, "fp32")
    found = bundle.under(again.evidence, again.records).records()
    kept = bundle.records()
    for split, part in ((TUNE, parts.tune), (CERTIFY, parts.judged)):
        rows = kept["split"] == split
        assert len(part) == rows.sum()
        same = found["final_prediction"][found["split"] == split] == kept["final_prediction"][rows]
        assert same.mean() > 0.999
        close = np.abs(found["confidence"] - kept["confidence"])[:, rows] < 1e-4
        assert close.mean() > 0.999


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_the_end_and_the_exits_share_the_promise(
    compiled: tuple[Bundle, PrecisionData], precision: Precision
) -> None:
    bundle, parts = compiled
    found = certified(compiled, precision)
    evidence, promise = found.evidence, found.evidence.policy.promise
    assert promise is not None
    assert (evidence.max_disagreement, evidence.confidence_level) == (0.2, 0.95)
    assert evidence.samples == len(parts.judged)
    spent = upper_bound(evidence.end_differs, evidence.samples, 0.975)
    assert evidence.spent(0.95) == pytest.approx(spent)
    assert promise.max_disagreement == pytest.approx(0.2 - spent)
    assert promise.confidence_level == pytest.approx(0.975)
    assert promise.certify_errors <= allowed_errors(
        evidence.samples, promise.max_disagreement, promise.confidence_level
    )
    assert [a.exit for a in evidence.policy.active] == [a.exit for a in bundle.policy.active]
    assert evidence.policy.version == bundle.policy.version

    # What is served with it, counted in another way: all that it answers unlike in float32.
    ranges = ranges_of(bundle, parts.ranges, threads=1)
    served = replace(bundle, policy=evidence.policy)
    seen = measure_precision(served, precision, ranges, parts.judged, unseen=True)
    assert seen.source_differs == evidence.end_differs
    assert seen.policy_differs <= promise.certify_errors + evidence.end_differs

    view = bundle.under(evidence, found.records)
    assert view.policy == evidence.policy
    records, rows = view.records(), [a.exit for a in evidence.policy.active]
    mine = records["split"] == CERTIFY
    agrees = records["prediction"] == records["final_prediction"]
    outcome = evaluate(
        records["confidence"][rows][:, mine],
        agrees[rows][:, mine],
        np.ones(len(rows) + 1),
        np.array([a.threshold for a in evidence.policy.active]),
    )
    assert outcome.errors == promise.certify_errors


def test_an_end_that_errs_by_itself_spends_the_promise(
    compiled: tuple[Bundle, PrecisionData],
) -> None:
    bundle, parts = compiled
    ranges = ranges_of(bundle, parts.ranges, threads=1)
    tiny = dict.fromkeys(ranges, 1e-3)
    with pytest.raises(VerificationError, match="that alone spends the promise") as refused:
        certify_engines(bundle, "int8", tiny, parts)
    assert "--accept-disagreement" in str(refused.value)


def test_so_does_one_of_which_too_little_is_known(
    compiled: tuple[Bundle, PrecisionData],
) -> None:
    bundle, parts = compiled
    few: Dataset = parts.judged.subset(np.arange(8))
    with pytest.raises(VerificationError, match=r"of 8 samples .* add more --data"):
        certify_engines(bundle, "fp16", None, parts._replace(judged=few))


def test_what_is_said_names_what_is_spent_and_left(
    compiled: tuple[Bundle, PrecisionData],
) -> None:
    found = certified(compiled, "fp16")
    spent = found.evidence.spent(0.95)
    said = found.describe()
    assert f"at most {spent:.2%} of all, which is taken from the promise (20.00% at 95%)" in said
    assert f"For exits {0.2 - spent:.2%} are left; certified again" in said
    silent = replace(found.evidence, policy=replace(found.evidence.policy, promise=None))
    assert "NONE CAN BE CERTIFIED" in replace(found, evidence=silent).describe()
