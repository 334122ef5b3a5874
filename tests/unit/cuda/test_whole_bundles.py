"""Whole bundles on the fake driver answer bit for bit what ONNX Runtime answers on the CPU."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.agreement import Inputs, Pair, Waiting, random_policy, twin
from tests.cuda_fakes import fake_cuda
from tests.engines import engine_bundle
from tests.sliced import inputs_of, sliced

from offramp.bundle import NEVER, ActiveExit, Bundle, ExitPolicy
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, make_chained_plan, make_plan

ROWS = 8
LOOKING_ON = ExitPolicy(
    version=1, active=tuple(ActiveExit(exit=index, threshold=NEVER) for index in (0, 1))
)


@functools.cache
def bundle_of(model: str, folder: Path) -> Bundle:
    return engine_bundle(model, folder / f"{model}.ee", exits_after=(0, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bundles")


def samples_of(model: str) -> Inputs:
    def inputs(rows: int, seed: int) -> Mapping[str, NDArray[Any]]:
        return inputs_of(sliced(model), rows, seed=seed)

    return inputs


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", ["residual", "bert with types", "dense", "mlp", "towers"])
def test_answers_are_those_of_the_cpu(model: str, seed: int, pads: bool, folder: Path) -> None:
    bundle = bundle_of(model, folder)
    backend, _, _ = fake_cuda(seed=seed, max_rows=2 * ROWS, pads=pads)
    slot = backend.open_slot()
    both = twin(backend, slot, bundle, seed=seed)
    both.run(samples_of(model), 12, rows=ROWS)
    assert both.stages > 12
    assert both.left
    slot.close()
    backend.close()


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("mode", ["off", "chained", "release"])
def test_stages_without_exits_and_exits_that_look_on(mode: str, pads: bool, folder: Path) -> None:
    bundle = bundle_of("bert with types", folder)
    plans = {
        "off": make_plan(bundle, mode=Mode.OFF),
        "chained": make_chained_plan(bundle),
        "release": make_plan(bundle, LOOKING_ON, Mode.RELEASE),
    }
    backend, _, _ = fake_cuda(max_rows=2 * ROWS, pads=pads)
    slot = backend.open_slot()
    both = twin(backend, slot, bundle, seed=1, plan=plans[mode])
    both.run(samples_of("bert with types"), 6, rows=ROWS)
    assert both.stages >= 6 * (1 if mode == "off" else 2)
    slot.close()
    backend.close()


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_slots_in_threads_share_what_is_buffered(seed: int, pads: bool, folder: Path) -> None:
    bundle = bundle_of("residual", folder)
    backend, _, driver = fake_cuda(seed=seed, max_rows=2 * ROWS, pads=pads)
    plan = make_plan(bundle, random_policy(bundle, np.random.default_rng(seed)))
    lock, buffered = threading.Lock(), list[Waiting]()
    failures: list[BaseException] = []

    def serve(number: int) -> None:
        slot = backend.open_slot()
        try:
            both = twin(backend, slot, bundle, seed=10 * seed + number, plan=plan)
            for turn in range(16):
                left = both.follow(0, both.new(samples_of("residual")(1 + turn % 2, turn)))
                with lock:
                    buffered.extend(left)
                    taken = buffered.pop(0) if buffered else None  # most often another thread's
                if taken is not None:
                    merged: Pair = both.merge([taken.pair])
                    both.follow(taken.stage, merged)
        except BaseException as error:
            failures.append(error)
        finally:
            slot.close()

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert driver.calls["launch_graph"] > 0
    buffered.clear()
    backend.close()


def test_sequences_of_any_length_share_a_slot(folder: Path) -> None:
    bundle = bundle_of("bert with types", folder)
    backend, _, _ = fake_cuda(max_rows=2 * ROWS)
    slot = backend.open_slot()
    both = twin(backend, slot, bundle, seed=3)

    def cut(rows: int, seed: int) -> Mapping[str, NDArray[Any]]:
        length = 4 + seed % 40  # beyond what was foreseen, too
        arrays = inputs_of(sliced("bert with types"), rows, seed=seed)
        return {n: np.resize(a, (rows, length)) for n, a in arrays.items()}

    for turn in range(24):
        pair = both.new(cut(1 + turn % 2, 7 * turn))
        both.follow(0, pair)
    assert slot.arena.growths > 0
    slot.close()
    backend.close()


def test_integers_are_narrow_where_the_engine_has_them_narrow(folder: Path) -> None:
    bundle = bundle_of("bert with types", folder)
    backend, _, _ = fake_cuda(max_rows=2 * ROWS, narrow=True)
    slot = backend.open_slot()
    both = twin(backend, slot, bundle, seed=5)
    both.run(samples_of("bert with types"), 6, rows=ROWS)
    slot.close()
    backend.close()


def test_a_pipeline_of_real_policies_runs_as_served(folder: Path) -> None:
    bundle = bundle_of("residual", folder)
    backend, _, _ = fake_cuda()
    slot = backend.open_slot()
    pipeline = Pipeline(backend, make_plan(bundle, ExitPolicy(version=1, active=())))
    departures = list(pipeline.run(slot, samples_of("residual")(5, 0)))
    assert [list(d.rows) for d in departures] == [[0, 1, 2, 3, 4]]
    slot.close()
    backend.close()
