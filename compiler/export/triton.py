"""The configuration of an exported file for Triton's ONNX Runtime backend.

Triton checks a configuration against the file, and does not take what it does not find there. Two
of its rules shape what is written here: dimensions may not be empty, so a tensor of one number a
sample is reshaped; and with batching no input may be optional, so thresholds are constants there
and inputs that the model never reads have to be sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from google.protobuf import text_format
from numpy.typing import NDArray

from offramp.bundle import TensorSpec
from offramp.bundle.schema.measured import Profile
from offramp.proto import messages
from offramp.proto.tensors import datatype_of

WARMUP: Final = "warmup"
"""Folder in which Triton looks for the tensors of warm-up requests."""
_NEAR_BEST: Final = 1.1
"""Batch sizes are preferred whose time for each sample is within this factor of the shortest."""
_DELAY_SHARE: Final = 0.1
"""Longest time in the queue, as a share of the time of one sample alone in the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFile:
    """An exported file as its configuration describes it."""

    name: str
    """The model's name in the repository."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sample: Mapping[str, NDArray[Any]]
    """Made inputs of one sample, [1, ...], to warm up with."""
    profile: Profile
    """The bundle's, measured where it was compiled."""
    metadata: Mapping[str, str]
    half_precision: bool
    """Whether ONNX Runtime must not optimise beyond the level ``extended``."""

    @property
    def max_batch_size(self) -> int:
        """Largest batch that the bundle was profiled with."""
        return self.profile.batch_sizes[-1]

    @property
    def preferred_batch_sizes(self) -> tuple[int, ...]:
        """Sizes at which a sample takes about the shortest time, in the unmodified model."""
        times = [
            milliseconds / size
            for milliseconds, size in zip(
                self.profile.source_ms, self.profile.batch_sizes, strict=True
            )
        ]
        most = _NEAR_BEST * min(times)
        return tuple(
            size for time, size in zip(times, self.profile.batch_sizes, strict=True) if time <= most
        )

    @property
    def max_queue_delay_us(self) -> int:
        """Longest time that a sample waits for others, microseconds."""
        alone_ms = self.profile.source_ms[0] / self.profile.batch_sizes[0]
        return round(1000 * _DELAY_SHARE * alone_ms)


def config_text(served: ServedFile) -> bytes:
    """Return the content of ``config.pbtxt``."""
    config = messages.ModelConfig(
        name=served.name,
        backend="onnxruntime",
        version_policy={"latest": {"num_versions": 1}},
        max_batch_size=served.max_batch_size,
        input=[_described(tensor) for tensor in served.inputs],
        output=[_described(tensor) for tensor in served.outputs],
        instance_group=[{"count": 1, "kind": "KIND_CPU"}],
        dynamic_batching={
            "preferred_batch_size": served.preferred_batch_sizes,
            "max_queue_delay_microseconds": served.max_queue_delay_us,
        },
        model_warmup=[_warmup(served, size) for size in (1, served.max_batch_size)],
    )
    if served.half_precision:
        config.optimization.graph.level = 1
    for key, value in served.metadata.items():
        config.parameters[key].string_value = value
    return text_format.MessageToString(config, use_short_repeated_primitives=True).encode()


def warmup_files(served: ServedFile) -> dict[str, bytes]:
    """Return the tensors of a warm-up request by their files in the model's folder."""
    return {
        f"{WARMUP}/{_file_of(number)}": np.ascontiguousarray(served.sample[tensor.name]).tobytes()
        for number, tensor in enumerate(served.inputs)
    }


def _warmup(served: ServedFile, batch_size: int) -> dict[str, Any]:
    """Describe a warm-up batch: as many requests of the same sample."""
    inputs = {
        tensor.name: {
            "data_type": _type_of(tensor),
            "dims": served.sample[tensor.name].shape[1:] or (1,),
            "input_data_file": _file_of(number),
        }
        for number, tensor in enumerate(served.inputs)
    }
    return {"name": f"batch of {batch_size}", "batch_size": batch_size, "inputs": inputs}


def _described(tensor: TensorSpec) -> dict[str, Any]:
    sizes = [size if isinstance(size, int) else -1 for size in tensor.shape[1:]]
    described = {"name": tensor.name, "data_type": _type_of(tensor), "dims": sizes or [1]}
    return described if sizes else described | {"reshape": {"shape": []}}


def _type_of(tensor: TensorSpec) -> str:
    return f"TYPE_{datatype_of(np.dtype(tensor.dtype), tensor.name)}"


def _file_of(number: int) -> str:
    """Name the file of an input, whose own name may hold what file systems refuse."""
    return f"input_{number}"
