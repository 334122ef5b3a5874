"""Supernets compiled: subnets of the model become variants, which answer as the subnets do."""

from __future__ import annotations

from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from tests.bundles import brief_measurements
from tests.part_sizes import check_part_sizes
from tests.supernet.elastic_torch import ElasticCnn, exported, shaken

from offramp.bundle import Bundle, ExitPolicy
from offramp.calibration.choose.trade_offs import kept_variants
from offramp.calibration.data.dataset import read_dataset, split
from offramp.certify import samples_needed
from offramp.compiler.blueprints import variants
from offramp.compiler.commands.cli import main
from offramp.compiler.frontend.model import read_model
from offramp.compiler.graphs import weight_parts, weights
from offramp.compiler.report.frontier import frontier_view
from offramp.engine.backends import make_backend
from offramp.engine.backends.onnxruntime import make_session
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import make_plan
from offramp.supernet.graphs import Supernet, read_spec
from offramp.supernet.graphs.elastic_spec import SubnetChoice
from offramp.supernet.graphs.extract import extract_subnet
from offramp.supernet.graphs.norm import SubnetNorm

SPEC = """
[[depth]]
skip = ["/blocks.2"]

[[width]]
weights = ["/blocks.0/conv1/Conv", "/blocks.1/conv1/Conv"]
ratios = [0.5]

[points]
keep = 3
"""
SAMPLES = 700
"""Fewest samples for the default promise."""
UNSEEN = 1000


def images(samples: int, *, seed: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    kinds = np.random.default_rng(99).standard_normal((10, 3, 8, 8)) * 3
    noise = rng.standard_normal((samples, 3, 8, 8)) * 0.3
    return (kinds[rng.integers(0, 10, samples)] + noise).astype(np.float32)


class Compiled(NamedTuple):
    bundle: Bundle
    folder: Path


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    folder = tmp_path_factory.mktemp("supernet")
    (folder / "spec.toml").write_text(SPEC)
    path = folder / "model.onnx"
    onnx.save(exported(shaken(ElasticCnn())), path)
    np.savez(folder / "data.npz", image=images(2 * SAMPLES, seed=1))
    arguments = ["supernet", path, "--elastic", folder / "spec.toml", "--data"]
    arguments += [folder / "data.npz", "--epochs", "2", "--max-disagreement", "0.05"]
    with pytest.MonkeyPatch.context() as patched, brief_measurements():
        for module in (weights, weight_parts, variants):  # else all weights stay in the graphs
            patched.setattr(module, "LEAST_BYTES", 64)
        assert main([str(a) for a in arguments]) == 0
    yield Compiled(Bundle.open(folder / "model.ee"), folder)


def test_subnets_are_variants_with_weights_of_the_model(compiled: Compiled) -> None:
    bundle = compiled.bundle
    assert 1 <= len(bundle.manifest.variants) <= 2, "three points are kept, the full model one"
    for shown in bundle.variants()[1:]:
        assert shown.manifest.exits[-1].head.kind == "own"
        assert shown.manifest.subnet == bundle.manifest.variants[shown.number - 1].name
        assert {s.file for s in shown.manifest.segments[:-1]} <= set(bundle.manifest.graphs)


def test_the_manifest_has_the_sizes_of_the_model_and_its_subnets(compiled: Compiled) -> None:
    check_part_sizes(compiled.bundle)


def test_the_report_compares_exits_and_subnets(compiled: Compiled) -> None:
    """The comparison during compilation is stored in the bundle."""
    page = (compiled.bundle.path / "report.html").read_text()
    assert "Exits × subnets" in page
    promise = compiled.bundle.policy.promise  # none where exits were measured to bring nothing
    promised = None if promise is None else 1 - promise.max_disagreement
    view = frontier_view(kept_variants(compiled.bundle), promised)
    assert view is not None
    assert view.sentence in unescape(page)
    assert [row.name for row in view.subnets[1:]] == [
        variant.name for variant in compiled.bundle.manifest.variants
    ]


def test_a_new_profile_keeps_the_comparison(compiled: Compiled, tmp_path: Path) -> None:
    with brief_measurements():
        arguments = ["profile", compiled.bundle.path, "--output", tmp_path / "again.ee"]
        assert main([str(a) for a in arguments]) == 0
    assert "Exits × subnets" in (tmp_path / "again.ee" / "report.html").read_text()


def test_what_it_costs_to_share_weights_is_measured_and_told(compiled: Compiled) -> None:
    bundle = compiled.bundle
    costs = bundle.manifest.weight_sharing
    assert [c.variant for c in costs] == [*range(len(bundle.manifest.variants) + 1)]
    assert costs[0].packed_bytes > max(c.packed_bytes for c in costs[1:]) > 0
    report = unescape((bundle.path / "report.html").read_text())
    for cost in costs:
        assert cost.describe() in report


def test_each_variant_answers_as_its_extracted_subnet_does(compiled: Compiled) -> None:
    """The subnet is a separate graph, in a separate session, with separate weights."""
    bundle, unseen = compiled.bundle, images(UNSEEN, seed=7)
    model = read_model(compiled.folder / "model.onnx")
    supernet = Supernet.of(model, read_spec(compiled.folder / "spec.toml"))
    choices = {supernet.spec.describe(c): c for c in supernet.spec.choices()}
    backend = make_backend("onnxruntime", threads=1, max_rows=50)
    for shown in bundle.variants()[1:]:
        wanted = extracted(supernet, choices[shown.manifest.subnet], compiled.folder)
        plan = make_plan(shown, ExitPolicy(version=1, active=()))
        pipeline, slot = Pipeline(backend, plan), backend.open_slot()
        for start in range(0, UNSEEN, 50):
            rows = {"image": unseen[start : start + 50]}
            found = pipeline.step(slot, 0, slot.upload(rows)).result.answer
            (expected,) = wanted.run(None, rows)
            assert found is not None
            largest = np.abs(expected).max()
            np.testing.assert_allclose(found / largest, expected / largest, atol=1e-5)


def extracted(supernet: Supernet, choice: SubnetChoice, folder: Path) -> Any:
    """Return the separate subnet, with norms of the same samples as in compilation."""
    dataset = read_dataset(folder / "data.npz", supernet.model.inputs)
    train = split(dataset, certify_at_least=samples_needed(0.05, 0.95), seed=0).train
    norm = SubnetNorm.of(supernet, train.subset(np.arange(min(len(train), 2048))), threads=1)
    return make_session(extract_subnet(supernet, choice, norm).proto.SerializeToString(), 1)
