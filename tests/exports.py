"""Exported files for tests: of bundles without training, run as a stock caller would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from offramp.bundle import ActiveExit, Bundle
from offramp.compiler.export.export import ExportOptions, export_bundle
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import make_plan
from offramp.tools.gpu.staged import REPLAY, plain_bundle
from tests.engines import engine_bundle
from tests.sliced import inputs_of, sliced

Arrays = dict[str, NDArray[Any]]


class ExportOutputs(NamedTuple):
    """Results for each of b samples."""

    answer: NDArray[Any]
    exit: NDArray[Any]
    confidence: NDArray[Any]


def replayed_bundle(model: str, folder: Path, *, exits_after: Sequence[int]) -> Bundle:
    """A bundle whose samples say at which exits they are sure; every threshold is one half."""
    pieces = sliced(model)
    active = [ActiveExit(exit=index, threshold=0.5) for index in range(len(exits_after))]
    return plain_bundle(
        pieces,
        folder / f"{model}.ee",
        inputs_of(pieces, 1),
        exits_after=exits_after,
        active=active,
        replayed=True,
    )


def replayed_inputs(model: str, sure: NDArray[np.float32]) -> Arrays:
    """Inputs of such a bundle; ``sure`` [b, exits] are the confidences."""
    return {**inputs_of(sliced(model), len(sure)), REPLAY: sure}


def exported(
    bundle: Bundle, folder: Path, inputs: Arrays, *, with_exits: bool = True, name: str = "f.onnx"
) -> Path:
    """Export a bundle, verified on some inputs."""
    np.savez(folder / "verify.npz", **inputs)
    done = export_bundle(
        ExportOptions(
            bundle=bundle.path,
            data=folder / "verify.npz",
            output=folder / name,
            with_exits=with_exits,
        )
    )
    assert done.path is not None
    return done.path


def stock_session(path: Path, *, optimised: bool = True) -> ort.InferenceSession:
    """A session as the documentation of ONNX Runtime shows it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_file(path: Path, inputs: Arrays, **overridden: float) -> ExportOutputs:
    """Answer, exit and confidence that a file gives; thresholds may be overridden."""
    session = stock_session(path)
    wanted = {i.name for i in session.get_inputs()}
    feeds = {name: array for name, array in inputs.items() if name in wanted}
    feeds |= {name: np.array(value, np.float32) for name, value in overridden.items()}
    answer, *rest = session.run(None, feeds)
    return ExportOutputs(answer, *rest)


def run_bundle(bundle: Bundle, inputs: Arrays) -> ExportOutputs:
    """The same of the bundle's stages, in ``leave`` mode."""
    plan = make_plan(bundle)
    pipeline = Pipeline(OnnxRuntimeBackend(), plan)
    departures = list(pipeline.run(pipeline.backend.open_slot(), inputs))
    rows = np.argsort(np.concatenate([d.rows for d in departures]))
    exits = [np.full(len(d.rows), plan.stages[d.stage].exit, object) for d in departures]
    found = [-1 if e is None else e for e in np.concatenate(exits)]
    return ExportOutputs(
        np.concatenate([d.answer for d in departures])[rows],
        np.array(found)[rows],
        np.concatenate([d.confidence for d in departures])[rows],
    )


def nodes_of(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """All nodes, those of branches too."""
    inner = [b for n in graph.node for a in n.attribute for b in (a.g, *a.graphs)]
    return [*graph.node, *(node for body in inner for node in nodes_of(body))]


__all__ = [
    "Arrays",
    "ExportOutputs",
    "engine_bundle",
    "exported",
    "nodes_of",
    "replayed_bundle",
    "replayed_inputs",
    "run_bundle",
    "run_file",
    "stock_session",
]
