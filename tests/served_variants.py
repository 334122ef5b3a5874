"""Bundles with variants that serve, of a tiny model whose quantised copies stand for subnets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from numpy.typing import NDArray

from offramp.bundle import Bundle, ExitPolicy, write_bundle
from offramp.bundle.files import dump
from offramp.calibration.measure import profiling
from offramp.compiler.graphs.source_model import SourceModel
from offramp.engine.backends import Backend
from offramp.engine.backends.onnxruntime import make_session
from offramp.engine.core import Engine
from offramp.engine.models.devices import StreamDevices
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.requests.results import EngineResult
from offramp.engine.requests.statistics import ModelStatistics
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.stages.plan import Mode
from tests import models
from tests.bundles import compile_tiny
from tests.integration.test_cascade import time_ms
from tests.integration.test_compile_tiny import Arrays, images
from tests.quantised import Rounded
from tests.variants import SubnetBundle, write_with_variants

ROWS = 60
BITS = (4, 2)
"""Bits of the weights of the copies that represent subnets: the first agrees more often."""


class Keeping:
    """Rounds weights, and keeps the copy."""

    def __init__(self, bits: int) -> None:
        self._round, self.copy = Rounded(bits), b""

    def __call__(self, model: SourceModel, samples: Any) -> bytes:
        self.copy = self._round(model, samples)
        return self.copy


class Compiled(NamedTuple):
    bundle: Bundle
    quiet: Bundle
    """The same without exits in use: each variant has one operating point, its own answer."""
    copies: list[bytes]
    unseen: Arrays

    def answers(self, graph: bytes) -> NDArray[Any]:
        session = make_session(graph, 1)
        found: NDArray[Any] = session.run(None, self.unseen)[0]
        return found

    @classmethod
    def of(cls, folder: Path) -> Compiled:
        """Open what :func:`compile_with_variants` left in a folder."""
        unseen = images(ROWS, seed=1)
        unseen.pop("label", None)
        return cls(
            bundle=Bundle.open(folder / "supernet.ee"),
            quiet=Bundle.open(folder / "quiet.ee"),
            copies=[(folder / f"{bits} bits.onnx").read_bytes() for bits in BITS],
            unseen=unseen,
        )

    @property
    def full(self) -> NDArray[Any]:
        return self.answers(self.bundle.read("source.onnx"))


def compile_with_variants(folder: Path) -> None:
    """Compile a tiny model with two variants: the smaller one is faster on any machine."""
    model, data = models.residual_cnn(), images()
    settings: dict[str, Any] = {"candidates": 2, "epochs": 2, "max_overhead": None}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(profiling.TimedGraph, "time_ms", time_ms)
        patched.setattr(profiling, "_staged_ms", lambda *_: 1.25)
        patched.setattr(profiling, "disturbances", lambda *_: ())
        full = compile_tiny(model, data, folder, name="full", own_times=True, **settings)
        subnets = []
        for number, bits in enumerate(BITS, 1):
            keeping = Keeping(bits)
            name = f"subnet{number}"
            made = compile_tiny(
                model,
                data,
                folder,
                name=name,
                quantise=keeping,
                precision="int8",
                **settings,
                own_times=True,
            )
            made = faster(made, 2.0**-number)
            subnets.append(SubnetBundle(name=f"{bits} bits", bundle=made))
            (folder / f"{bits} bits.onnx").write_bytes(keeping.copy)
        bundle = write_with_variants(folder / "supernet.ee", full, subnets)
        with_policies(bundle, folder / "quiet.ee", ExitPolicy(version=3, active=()))


def faster(bundle: Bundle, factor: float) -> Bundle:
    """Write a bundle again whose profile says that all but the model itself is so much faster."""
    profile = bundle.profile()
    quick = [tuple(factor * ms for ms in row) for row in profile.segments_ms[:-1]]
    changed = replace(profile, segments_ms=(*quick, profile.segments_ms[-1]))
    files: dict[str, Any] = {e.path: bundle.read(e.path) for e in bundle.manifest.files}
    files["profiles/cpu.json"] = dump(changed)
    manifest = replace(bundle.manifest, files=())
    return write_bundle(bundle.path, manifest, bundle.policy, files, overwrite=True)


def serve(
    bundle: Bundle,
    body: Callable[[Engine], Coroutine[Any, Any, None]],
    *,
    mode: Mode = Mode.LEAVE,
    policy: str,
    backend: Backend | None = None,
    devices: StreamDevices | None = None,
    **options: Any,
) -> None:
    """Serve a bundle as ``m`` while ``body`` runs; a ``backend`` that is given stays open."""

    async def run() -> None:
        defaults = ModelOptions(scheduling=PolicyName.parse(policy), max_batch_size=8, **options)
        served = EngineOptions(
            mode=mode,
            backend="onnxruntime",
            devices=devices,
            defaults=defaults,
            threads=1,
            keep_state=False,
        )
        async with await Engine.open({"m": bundle.path}, served, backend=backend) as engine:
            await asyncio.wait_for(body(engine), 60)

    asyncio.run(run())


def answers_of(result: EngineResult) -> NDArray[Any]:
    (answers,) = result.outputs.values()
    return answers


def own(bundle: Bundle, variant: int) -> int:
    return bundle.manifest.variants[variant - 1].exits[-1].index


def fixed(bundle: Bundle, variant: int) -> str:
    return f"fixed:{own(bundle, variant)}@{variant}"


def of(engine: Engine) -> ModelStatistics:
    return engine.statistics()["m"]


def with_policies(bundle: Bundle, path: Path, policy: ExitPolicy) -> Bundle:
    """Write the bundle with the same policy for each variant."""
    files: dict[str, Any] = {e.path: bundle.read(e.path) for e in bundle.manifest.files}
    files |= {v.folder + "policy.json": dump(policy) for v in bundle.manifest.variants}
    manifest = replace(bundle.manifest, files=())
    return write_bundle(path, manifest, bundle.policy, files, overwrite=True)
