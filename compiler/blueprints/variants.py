"""Variants of a model: subnets with exits of their own, stored in the model's bundle.

A subnet is put in front of the model like every copy (:mod:`.cascade`): exits follow the subnet's
segments, and the subnet's own answer is the last exit. The unmodified model comes last; audits run
it. So subnets are trained, recorded, certified and served like any cascade. Exits are trained on
the subnet's own features, to answer what the *model* answers.

A model and its variants can share weights in memory
(:class:`~offramp.engine.graphs.external_weights.WeightForm`). Sessions with shared weights do not
pack weights for their kernels, and use no blocked layouts. The cost in time depends on the model
and the machine, so sessions with shared and with packed weights are timed in alternation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

import numpy as np
import onnx

from offramp.bundle import SharingCost, Variant
from offramp.bundle.bundle import POLICY, RECORDS
from offramp.bundle.files import dump
from offramp.bundle.graph_weights import ITEM_BYTES
from offramp.bundle.schema.parts import folder_of
from offramp.calibration.choose.exit_records import dump_records
from offramp.calibration.choose.trade_offs import RecordedVariant
from offramp.calibration.measure.estimates import widest_ratio
from offramp.calibration.measure.profiling import TimedGraph
from offramp.compiler.blueprints.blueprint import Blueprint, draw, own_exit, time_copy
from offramp.compiler.blueprints.cascade import slice_subnet
from offramp.compiler.blueprints.packing import PROFILE, BuiltVariant, judged
from offramp.compiler.cuts.slicing import Sliced
from offramp.compiler.exits.exits import find_exits
from offramp.compiler.exits.policy_choice import record_exits
from offramp.compiler.exits.timed_model import CompileRun
from offramp.compiler.graphs.graph import serialised
from offramp.compiler.graphs.part_sizes import sized_segments
from offramp.compiler.graphs.source_model import SourceModel
from offramp.compiler.graphs.weight_parts import in_parts
from offramp.compiler.graphs.weights import LEAST_BYTES
from offramp.engine.common.timing import Effort, time_rounds
from offramp.engine.graphs.external_weights import WeightForm


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnVariant:
    """A subnet with its exits, before it is certified."""

    name: str
    blueprint: Blueprint
    proto: onnx.ModelProto
    """The subnet as one graph. Its weights are in the graph, or in the model's file by name."""


class VariantFinder(Protocol):
    """Protocol of an object that finds the variants of a model that save enough time."""

    @property
    def model(self) -> SourceModel:
        """The model, with its weights stored so that variants can share them."""
        ...

    def find(self, plain: Blueprint, run: CompileRun) -> tuple[DrawnVariant, ...]:
        """Return variants, the largest first; ``plain`` is the model with its exits.

        Raises the errors of :func:`draw_variant`.
        """
        ...


def draw_variant(
    name: str, subnet: onnx.ModelProto, plain: Blueprint, run: CompileRun
) -> DrawnVariant:
    """Cut a subnet where its model ``plain`` was cut, and find exits for it.

    Raises:
        CompileError: The subnet's pieces differ from it.
        DataError: The subnet fails on samples.
    """
    copy = serialised(subnet)
    sliced = slice_subnet(plain.sliced, copy, run.options)
    timed = time_copy(sliced, copy, run)
    # the subnet's own answer follows the last cut, so it needs no exit
    found = find_exits(replace(timed, sliced=replace(sliced, cuts=sliced.cuts[:-1])))
    exits = [*found.built, own_exit(timed, plain)]
    blueprint = draw(replace(timed, sliced=sliced.without_weights()), exits)
    weights = plain.sliced.weights
    kept = subnet if weights is None else weights.light(subnet)
    return DrawnVariant(name=name, blueprint=blueprint, proto=kept)


def build_variant(index: int, drawn: DrawnVariant, run: CompileRun, count: int) -> BuiltVariant:
    """Certify a variant, and describe it as number ``index`` of ``count``.

    While serving, answers may come from any variant. All certificates must be valid together with
    the requested confidence, so the risk of each certificate is a ``count``-th of the total.
    """
    blueprint, folder = drawn.blueprint, folder_of(index)
    draft = blueprint.draft
    title = f"Certify {drawn.name}"
    certify = record_exits(draft, draft.read, run.parts.certify, title, run.progress)
    level = 1 - (1 - run.options.promise.confidence_level) / count
    policy = replace(blueprint.choice, confidence_level=level).certify(blueprint.path, certify)
    *own, source = sized_segments(draft, draft.read, run.parts.train.take(slice(1)))
    names = [segment.file for segment in own] + [exit_.file for exit_ in draft.exits]
    files = {
        folder + RECORDS: dump_records(blueprint.tune, certify),
        folder + PROFILE: dump(blueprint.choice.profile),
        folder + POLICY: dump(policy),
    }
    variant = Variant(
        index=index,
        name=drawn.name,
        segments=(*(replace(s, file=folder + s.file) for s in own), source),
        exits=tuple(replace(judged(e, certify), file=folder + e.file) for e in draft.exits),
    )
    graphs = {folder + name: draft.files[name] for name in names}
    recorded = RecordedVariant(
        variant=index,
        name=drawn.name,
        tune=blueprint.tune,
        cost=blueprint.choice.cost(blueprint.choice.batch_size),
        in_use=tuple(active.exit for active in policy.active),
    )
    return BuiltVariant(
        variant=variant, graphs=graphs, files=files, recorded=recorded, certify=certify
    )


_EFFORT: Final = Effort(least=8, most=40, seconds=1.0)
_PACKING: Final = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU"})
"""Operators whose kernels pack weights or use blocked layouts."""


def measure_sharing(
    sliced: Sliced, drawn: Sequence[DrawnVariant], run: CompileRun
) -> tuple[SharingCost, ...]:
    """Time a model and its variants with shared and with packed weights; empty without variants.

    All graphs refer to their large weights in one file, which is memory-mapped during the
    measurement, as in every compilation (:func:`~offramp.compiler.graphs.weights.weight_file`).
    """
    protos = [sliced.model.proto, *(variant.proto for variant in drawn)]
    if not drawn or not packed_bytes(protos[0]):
        return ()
    named = {str(n): serialised(proto) for n, proto in enumerate(protos)}
    graphs, found = in_parts(named, sliced.weights), []
    with run.progress.step("Measure shared weights", len(protos)) as advance:
        for number, proto in enumerate(protos):
            found.append(_measured(number, graphs[str(number)], packed_bytes(proto), run))
            advance(1)
    return tuple(found)


def _measured(variant: int, light: bytes, packed: int, run: CompileRun) -> SharingCost:
    options, train = run.options, run.parts.train
    rows = train.take(np.arange(options.choice.reference_batch_size) % len(train))
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
    """Return the size in bytes of the large weights that packing would copy."""
    read = {name for n in proto.graph.node if n.op_type in _PACKING for name in n.input[1:]}
    sizes = [
        int(np.prod(tensor.dims)) * ITEM_BYTES.get(tensor.data_type, 0)
        for tensor in proto.graph.initializer
        if tensor.name in read
    ]
    return sum(size for size in sizes if size >= LEAST_BYTES)
