"""The whole engine on the fake driver: what tests/gpu asks of a GPU, of fewer requests."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.cuda_fakes import FakeExecutable, FakeExecutables, fake_cuda
from tests.engines import engine_bundle
from tests.serving_checks import (
    MODEL,
    Truth,
    agree,
    bad_fails_alone,
    drained,
    opened_and_closed,
    options,
    replaced,
    swapped,
)
from tests.small_bert import sentences, small_bert
from tests.small_bert import truth as truth_of
from tests.unit.engine.serving import until

from offramp.bundle import Bundle
from offramp.engine.backends import Backend
from offramp.engine.common.errors import BackendError
from offramp.engine.core import Engine
from offramp.engine.cuda.executable import Shape
from offramp.engine.stages.plan import Mode
from offramp.testing.cuda_driver import FakeDriver

MOST = 8


class Fake(NamedTuple):
    """A backend, and what it is made of."""

    backend: Backend
    factory: FakeExecutables
    driver: FakeDriver


def fake(*, graphs: bool = True) -> Fake:
    return Fake(*fake_cuda(graphs=graphs, pads=graphs, max_rows=MOST))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return small_bert(tmp_path_factory.mktemp("bundles"))


@pytest.fixture
def path(bundle: Bundle) -> Path:
    return bundle.path


@pytest.fixture(scope="module")
def truth(bundle: Bundle) -> Truth:
    return truth_of(bundle, samples=64, tolerance=1e-5)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("mode", [Mode.LEAVE, Mode.AUDIT])
def test_the_engine_answers_as_the_cpu(
    path: Path, truth: Truth, mode: Mode, *, graphs: bool
) -> None:
    made = fake(graphs=graphs)
    how = options(mode, most=MOST)
    left = asyncio.run(agree(made.backend, path, truth, how, requests=60))
    assert min(left) > 20
    made.backend.close()
    assert (made.driver.calls["launch_graph"] > 0) is graphs


def test_what_cannot_be_run_fails_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The case is an engine whose largest profile holds sixteen tokens."""
    shapes_of = FakeExecutable.output_shapes

    def output_shapes(self: FakeExecutable, given: Mapping[str, Shape]) -> Mapping[str, Shape]:
        if any(len(shape) > 1 and shape[1] > 16 for shape in given.values()):
            raise BackendError("no profile holds so many tokens")
        return shapes_of(self, given)

    monkeypatch.setattr(FakeExecutable, "output_shapes", output_shapes)
    bundle = engine_bundle("bert", tmp_path / "bert.ee")
    made = fake()
    good = Truth.of(bundle, sentences(32, tokens=12), 1e-5)
    bad = sentences(2, tokens=17)
    said = asyncio.run(bad_fails_alone(made.backend, bundle.path, good, bad, options(most=MOST)))
    assert "no profile holds so many tokens" in said
    made.backend.close()


def test_draining_answers_what_is_in_flight(path: Path, truth: Truth) -> None:
    made = fake()
    asyncio.run(drained(made.backend, path, truth, options(most=MOST)))
    made.backend.close()


def test_policies_are_swapped_while_serving(path: Path, truth: Truth) -> None:
    made = fake()
    how = options(Mode.AUDIT, most=MOST)
    asyncio.run(swapped(made.backend, path, truth, how, swaps=8))
    made.backend.close()


def test_bundles_are_replaced_while_serving(path: Path, truth: Truth, tmp_path: Path) -> None:
    """Device memory is that of one version after each removal."""
    made, other = fake(), small_bert(tmp_path, seed=1)
    bundles = [Bundle.open(path), other]
    truths = [truth, Truth.of(other, truth.inputs, truth.tolerance)]
    stages: list[int] = []

    async def settled(engine: Engine) -> None:
        stages.append(len(engine.model(MODEL).policy.active) + 1)
        gc.collect()
        await until(lambda: made.factory.open["stages"] == stages[-1])

    how = options(Mode.AUDIT, most=MOST)
    asyncio.run(replaced(made.backend, bundles, truths, how, times=6, settled=settled))
    assert len(stages) == 6
    made.backend.close()


def test_serving_again_and_again_leaves_no_memory_behind(path: Path, truth: Truth) -> None:
    kept: list[Fake] = []

    def make() -> Backend:
        kept.append(fake())
        return kept[-1].backend

    how = options(most=MOST)
    free = opened_and_closed(
        make, path, truth, how, times=2, free_bytes=lambda: int(kept[-1].driver._closed)
    )
    assert free == [1, 1]  # a fake driver that is closed has found no leak
