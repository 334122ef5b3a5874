"""What it costs a model to run on shared weights, measured while it is compiled.

Sessions that share weights in memory (:class:`~.graphs.external_weights.WeightForm`) pack
none for their kernels, and have no blocked layouts. How much longer they take depends on the model
and on the machine, so it is measured, in turns with a session as it is otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import onnx

from offramp.bundle import SharingCost
from offramp.bundle.graph_weights import ITEM_BYTES
from offramp.calibration.measure.estimates import widest_ratio
from offramp.calibration.measure.profiling import TimedGraph
from offramp.compiler.blueprints.blueprint import CompileRun
from offramp.compiler.graphs.graph import serialised
from offramp.compiler.graphs.weight_parts import in_parts
from offramp.compiler.graphs.weights import LEAST_BYTES, WeightFile
from offramp.engine.common.timing import Effort, time_rounds
from offramp.engine.graphs.external_weights import WeightForm

_EFFORT: Final = Effort(least=8, most=40, seconds=1.0)
_PACKING: Final = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU"})
"""Operators whose kernels pack weights, or have them in blocks."""


def measure_sharing(
    protos: Sequence[onnx.ModelProto], weights: WeightFile | None, run: CompileRun
) -> tuple[SharingCost, ...]:
    """Time models with shared weights beside packed ones, and count what would be shared.

    ``protos`` are the full model and its variants, as they go into a bundle. They name their large
    weights in ``weights``, which is mapped meanwhile, as all models do that are compiled
    (:func:`~offramp.compiler.graphs.weights.weight_file`).
    """
    graphs = in_parts({str(n): serialised(proto) for n, proto in enumerate(protos)}, weights)
    found = []
    with run.progress.step("Measure shared weights", len(protos)) as advance:
        for number, proto in enumerate(protos):
            found.append(_measured(number, graphs[str(number)], packed_bytes(proto), run))
            advance(1)
    return tuple(found)


def _measured(variant: int, light: bytes, packed: int, run: CompileRun) -> SharingCost:
    options, train = run.options, run.parts.train
    rows = train.take(np.arange(options.reference_batch_size) % len(train))
    graphs = [TimedGraph(light, options.threads, form) for form in WeightForm]  # packed first
    timed = time_rounds(
        [[partial(graph.time_ms, rows) for graph in graphs]], [1], _EFFORT, widest_ratio
    )
    (ratio,) = timed.rounds[0].ratios()
    return SharingCost(
        variant=variant,
        time_ratio=ratio.value,
        half_width=ratio.half_width,
        packed_bytes=packed,
    )


def packed_bytes(proto: onnx.ModelProto) -> int:
    """Count the bytes of large weights that packing would make a copy of."""
    read = {name for n in proto.graph.node if n.op_type in _PACKING for name in n.input[1:]}
    sizes = [
        int(np.prod(tensor.dims)) * ITEM_BYTES.get(tensor.data_type, 0)
        for tensor in proto.graph.initializer
        if tensor.name in read
    ]
    return sum(size for size in sizes if size >= LEAST_BYTES)
