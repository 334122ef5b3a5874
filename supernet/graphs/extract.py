"""Extraction of subnets as separate models, with the origin of each of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import onnx
from onnx import numpy_helper

from offramp.compiler.graphs.shapes import annotate, forget_shapes
from offramp.compiler.graphs.weight_parts import has_first_channels
from offramp.supernet.graphs.elastic_model import Supernet
from offramp.supernet.graphs.elastic_spec import SubnetChoice
from offramp.supernet.graphs.errors import NotElasticError
from offramp.supernet.graphs.norm import SubnetNorm
from offramp.supernet.graphs.slicing_plan import apply_plan

WeightKind: TypeAlias = Literal["whole", "prefix", "channels", "own"]
"""Origin of a weight: ``whole``, a supernet's weight, unchanged; ``prefix``, its first bytes;
``channels``, its first input and output channels (:mod:`~offramp.compiler.graphs.weight_parts`);
``own``, bytes that only the subnet has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOrigin:
    """Origin of a subnet's initializer."""

    kind: WeightKind
    source: str
    """Supernet's initializer from which the subnet's initializer was made; empty if there is none.
    """
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Subnet:
    """A subnet as a separate model, with the supernet's inputs and outputs."""

    choice: SubnetChoice
    description: str
    proto: onnx.ModelProto
    """The checked model, with shapes inferred; tensors and operators keep their names."""
    origins: Mapping[str, WeightOrigin]
    """Origin of each weight in the supernet, by the weight's name."""

    @property
    def shared_bytes(self) -> int:
        """Number of bytes in weights that are stored as parts of the supernet's weights."""
        return sum(o.size_bytes for o in self.origins.values() if o.kind != "own")

    @property
    def own_bytes(self) -> int:
        """Number of bytes in weights that only the subnet has."""
        return sum(o.size_bytes for o in self.origins.values() if o.kind == "own")


def extract_subnet(
    supernet: Supernet, choice: SubnetChoice, norm: SubnetNorm | None = None
) -> Subnet:
    """Return a subnet as a model: LayerSelect, WeightSlice and SubnetNorm (SuperServe, 3).

    Without ``norm``, layers keep the supernet's statistics; with these, the paper measured
    accuracies as low as 10 %.

    Raises:
        ElasticSpecError: The spec does not allow the choice.
        NotElasticError: The graph cannot be reduced; the message names the operator.
        DataError: The subnet fails on a calibration sample.
    """
    proto = supernet.shallow(choice)
    plan = supernet.plan(choice, proto)
    sources = apply_plan(proto, plan, supernet.initializers)
    wanted = [o.type.tensor_type.elem_type for o in proto.graph.output]
    if choice != supernet.spec.full:
        forget_shapes(proto.graph)
        annotate(proto)
    else:
        proto.graph.value_info.extend(supernet.model.proto.graph.value_info)
    if norm is not None and choice != supernet.spec.full:
        norm.apply(proto, plan, supernet.skipped(choice))
        annotate(proto)
    _check(proto, wanted)
    origins = {
        tensor.name: _origin(tensor, sources.get(tensor.name, ""), supernet)
        for tensor in proto.graph.initializer
    }
    return Subnet(
        choice=choice,
        description=supernet.spec.describe(choice),
        proto=proto,
        origins=origins,
    )


def _check(proto: onnx.ModelProto, elem_types: list[int]) -> None:
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        reason = str(error).splitlines()[0]
        raise NotElasticError(
            f"the subnet is not an ONNX model ({reason}); this is a bug, report it with the model"
        ) from error
    assert [o.type.tensor_type.elem_type for o in proto.graph.output] == elem_types


def _origin(tensor: onnx.TensorProto, source: str, supernet: Supernet) -> WeightOrigin:
    """Find a weight's origin by comparing bytes with the supernet's weight ``source``.

    A weight that equals the first bytes of ``source`` can be stored as a view of it.
    """
    content = numpy_helper.to_array(tensor).tobytes()
    kind: WeightKind = "own"
    if source:
        values = numpy_helper.to_array(supernet.initializers[source])
        whole = values.tobytes()
        if whole.startswith(content):
            kind = "whole" if len(whole) == len(content) else "prefix"
        elif has_first_channels(numpy_helper.to_array(tensor), values):
            kind = "channels"
    return WeightOrigin(kind=kind, source=source, size_bytes=len(content))
