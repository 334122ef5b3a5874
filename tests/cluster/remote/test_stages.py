"""A worker creates exactly the requested stage of the same bundle, or reports why not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
from tests.facts import Told, facts
from tests.fakes import fake_plan

from offramp.bundle import ActiveExit, Bundle, ExitPolicy
from offramp.certify import NEVER
from offramp.cluster.remote.launching import LocalLauncher
from offramp.cluster.remote.stage_orders import BundlesByPath, describe_stage, make_described
from offramp.cluster.remote.worker_backend import RemoteBackend
from offramp.cluster.remote.worker_messages import FrameError
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.errors import BackendError
from offramp.engine.graphs.external_weights import WeightForm
from offramp.engine.stages.plan import Mode, StageSpec, make_chained_plan, make_plan

GOLDEN = Path(__file__).parents[2] / "golden" / "bundle"


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle.open(GOLDEN)


def stages_of(bundle: Bundle) -> Iterator[StageSpec]:
    """All kinds of stages: of the policy, of other exits, in shadow mode, whole, and chained."""
    some = tuple(ActiveExit(exit=e, threshold=NEVER) for e in (1, 3))
    for mode in Mode:
        yield from make_plan(bundle, mode=mode).stages
    yield from make_plan(bundle, ExitPolicy(version=0, active=some), Mode.AUDIT).stages
    yield from make_plan(bundle, ExitPolicy(version=0, active=())).stages
    yield from make_chained_plan(bundle).stages


def test_every_stage_of_a_bundle_is_made_again_as_it_was(bundle: Bundle) -> None:
    named = 0
    for spec in stages_of(bundle):
        asked = replace(spec, weight_form=WeightForm.SHARED)
        document, graph = describe_stage(asked)
        again = make_described(document, graph, BundlesByPath())
        for field in fields(StageSpec):
            if field.name not in ("load", "bundle"):
                assert getattr(again, field.name) == getattr(asked, field.name), field.name
        assert again.load() == spec.load()
        assert again.load_light().model == spec.load_light().model
        assert not graph, "a stage of a bundle is named, its graph does not travel"
        named += 1
    assert named > 30


def test_a_stage_of_no_bundle_is_described_and_its_graph_travels() -> None:
    spec = replace(fake_plan([0.9]).stages[0], load=lambda: b"graph")
    document, graph = describe_stage(spec)
    again = make_described(document, graph, BundlesByPath())
    assert replace(again, load=spec.load) == spec
    assert (graph, again.load()) == (b"graph", b"graph")


def test_a_stage_that_its_bundle_does_not_make_is_refused(bundle: Bundle) -> None:
    spec = replace(make_plan(bundle).stages[0], given=("nothing",), inputs=())
    with pytest.raises(BackendError, match=facts("stage 0", "inputs", "bundle")):
        describe_stage(spec)


def test_another_bundle_at_the_same_place_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    place = tmp_path / "model.ee"
    shutil.copytree(GOLDEN, place)
    opened = Bundle.open(place)
    document, _ = describe_stage(make_plan(opened).stages[0])
    renamed = replace(opened, manifest=replace(opened.manifest, name="other"))
    with pytest.raises(BackendError, match=facts("model.ee", "bundle", "server")):
        make_described(document, b"", BundlesByPath(lambda _: renamed))
    shutil.rmtree(place)
    with pytest.raises(BackendError, match=r"model\.ee is not a bundle"):
        make_described(document, b"", BundlesByPath())


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"variant": 1}, ("no variant 1",)),
        ({"exit": 99}, ("segments 0 to", "exit 99")),
        ({"last_segment": 400}, ("segments 0 to 400",)),
        ({"first_segment": -1}, ("segments -1",)),
        ({"weight_form": "raw"}, ("malformed", "'raw'", "WeightForm")),
        ({"index": "0"}, ("malformed", "stage.index")),
    ],
)
def test_a_name_of_no_stage_is_refused(
    bundle: Bundle, changed: dict[str, object], told: Told
) -> None:
    document, _ = describe_stage(make_plan(bundle).stages[0])
    named = json.loads(document)["named"]
    with pytest.raises(FrameError, match=facts(*told)):
        make_described(json.dumps({"named": {**named, **changed}}), b"", BundlesByPath())


@pytest.mark.parametrize("document", ["", "[]", "{}", '{"called": {}}', "nul", "[" * 100_000])
def test_documents_that_are_none_are_refused(document: str) -> None:
    with pytest.raises(FrameError, match=r"^a stage (is|has the key) "):
        make_described(document, b"", BundlesByPath())


def test_stages_that_nobody_has_are_forgotten_by_workers_and_failures_are_told(
    bundle: Bundle,
) -> None:
    backend = RemoteBackend(OnnxRuntimeBackend(), launchers=[LocalLauncher()])
    try:
        first = backend.prepare(make_plan(bundle).stages[0])
        second = backend.prepare(make_plan(bundle).stages[1])
        (entry,) = backend._pool
        assert entry.worker is not None
        assert entry.worker.stages == {first.number, second.number}
        del first
        broken = replace(fake_plan([0.9]).stages[0], load=lambda: b"no graph")
        with pytest.raises(BackendError, match="ONNX Runtime cannot load stage 0: "):
            backend.prepare(broken)
        assert entry.worker.stages == {second.number}
    finally:
        backend.close()
