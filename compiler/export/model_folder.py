"""The folder of an exported model in a repository: the file, its configuration, and a README.

Triton compares the configuration with the model file, and rejects entries that are not in the file.
Two of Triton's rules determine the configuration. Dimensions may not be empty, so a tensor with one
number per sample is reshaped. With batching no input may be optional, so thresholds are constants,
and clients must also send inputs that the model never reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from google.protobuf import text_format
from numpy.typing import NDArray

from offramp import __version__
from offramp.bundle import Bundle, TensorSpec
from offramp.bundle.files import FileContent
from offramp.bundle.schema.measured import Profile
from offramp.compiler.export.export_verification import has_float16_weights
from offramp.compiler.export.nesting import METADATA, Names
from offramp.compiler.export.repositories import README, WRITTEN_BY, Repository
from offramp.compiler.graphs.runtime import random_inputs
from offramp.proto import messages
from offramp.proto.tensors import datatype_of

LOST: Final = {
    "audits": "No sample that leaves early is run to the end as well, so nothing measures how "
    "often answers differ from the unmodified model's.",
    "the drift alarm": "If inputs change, exits keep answering, and nothing warns.",
    "renewed certificates": "The promise is what was certified at compilation, for data like the "
    "calibration data. Thresholds never adapt.",
    "scheduling of survivors": "A batch is answered as a whole: easy samples wait for the hard "
    "ones, and the hard ones of several batches are not merged.",
    "the check of inputs": "Samples far outside the calibration data are answered by exits like "
    "any other.",
}
"""Features of ``eeserve`` with a bundle that are lost if another server runs the exported model."""

_FILES: Final = {
    "1/model.onnx": ("the model, with exits inside", {"triton", "ovms"}),
    "config.pbtxt": ("Triton's configuration", {"triton"}),
    "warmup/": ("generated inputs, which Triton runs when it loads the model", {"triton"}),
    "../config.json": ("the models that OpenVINO Model Server loads", {"ovms"}),
    "../{name}.kserve.yaml": ("the definition by which KServe runs Triton", {"kserve"}),
}
"""Purpose of each file in the folder, and the servers that read the file."""
_STARTS: Final = {
    "triton": """\
Triton, in an image that has the ONNX Runtime backend:

    docker run --rm -p 8000:8000 -p 8001:8001 -v "$PWD":/models \\
        nvcr.io/nvidia/tritonserver:YY.MM-py3 tritonserver --model-repository=/models
""",
    "ovms": """\
OpenVINO Model Server:

    docker run --rm -p 9000:9000 -v "$PWD":/models openvino/model_server \\
        --config_path /models/config.json --port 9000
""",
    "kserve": """\
KServe, once the folder is at its URI:

    kubectl apply -f {name}.kserve.yaml
""",
}


def model_files(
    bundle: Bundle,
    place: Repository,
    model: onnx.ModelProto,
    content: Mapping[str, FileContent],
    names: Names,
) -> dict[str, FileContent]:
    """Return the files of the model's folder, by relative path.

    ``content`` is the serialised ``model``, and its weight file if there is one. ``names`` are the
    names that exporting added to the model.
    """
    served = _describe(bundle, place.name, model, names)
    files = {**content, README: _readme(bundle, place, served).encode()}
    if "triton" in place.servers:
        files |= {"config.pbtxt": config_text(served), **warmup_files(served)}
    return files


def _describe(bundle: Bundle, name: str, model: onnx.ModelProto, names: Names) -> ServedFile:
    manifest = bundle.manifest
    (answer,) = (o for o in manifest.served_outputs if o.name == manifest.answer.output)
    added = {names.exit: "int32", names.confidence: "float32"}
    given = {output.name for output in model.graph.output}
    return ServedFile(
        name=name,
        inputs=manifest.declared,
        outputs=(
            answer,
            *(
                TensorSpec(name=each, dtype=dtype, shape=answer.shape[:1])
                for each, dtype in added.items()
                if each in given
            ),
        ),
        sample=_made_sample(bundle),
        profile=bundle.profile(),
        metadata={
            entry.key: entry.value
            for entry in model.metadata_props
            if entry.key.startswith(METADATA)
        },
        half_precision=has_float16_weights(model.graph),
    )


def _made_sample(bundle: Bundle) -> dict[str, NDArray[Any]]:
    """Return generated inputs of one sample, [1, ...], with the sizes of the calibration data.

    Inputs are not taken from the data, because the data may be private.
    """
    source = onnx.load_model_from_string(bundle.graph(bundle.manifest.source.file))
    shapes = bundle.manifest.calibration.sample_shapes
    sizes: dict[int | str, int] = {}
    for info in source.graph.input:
        dims = list(info.type.tensor_type.shape.dim)[1:]
        for dim, size in zip(dims, shapes[info.name], strict=True):
            sizes[dim.dim_param] = size
            dim.dim_value = size
    made: dict[str, NDArray[Any]] = dict(random_inputs(source, 1))
    for unread in bundle.manifest.unread:
        shape = [s if isinstance(s, int) else sizes.get(s, 1) for s in unread.spec.shape[1:]]
        made[unread.spec.name] = np.zeros((1, *shape), unread.spec.dtype)
    return made


def _readme(bundle: Bundle, place: Repository, served: ServedFile) -> str:
    written = (
        f"{WRITTEN_BY} (Offramp {__version__}) from the bundle {bundle.manifest.name}: one ONNX "
        "file, in which easy samples leave the model early, at exits."
    )
    lines = [f"# {place.name}", "", written, "", "| file | content |", "|---|---|"]
    lines += [
        f"| `{file.format(name=place.name)}` | {content} |"
        for file, (content, readers) in _FILES.items()
        if readers & {*place.servers}
    ]
    lines += ["", "## Start a server", "", "In the folder above this one.", ""]
    lines += [_STARTS[server].format(name=place.name) for server in place.servers]
    lines += ["## What holds", "", *(f"- {fact}" for fact in _facts(place, served))]
    lines += ["", "## What is lost", ""]
    lines += ["Compared with serving the bundle with `eeserve`, this is missing:", ""]
    lines += [f"- **{what[0].upper()}{what[1:]}.** {why}" for what, why in LOST.items()]
    return "\n".join([*lines, ""])


def _facts(place: Repository, served: ServedFile) -> list[str]:
    answer, *added = served.outputs
    inputs = ", ".join(f"`{tensor.describe()}`" for tensor in served.inputs)
    facts = [f"Inputs: {inputs}. Answer: `{answer.describe()}`."]
    if added:
        exit_, confidence = added
        facts.append(
            f"`{exit_.name}` is the index of the exit that answered a sample, -1 for the model's "
            f"end; `{confidence.name}` is the confidence of that answer, from 0 to 1."
        )
    if (certified := served.metadata.get("offramp.promise")) is not None:
        promise = json.loads(certified)
        facts.append(
            f"The promise: at most {promise['max_disagreement']:.2%} of the answers differ from "
            f"the unmodified model's, with {promise['confidence']:.0%} confidence, on data like "
            "the calibration data. It was certified with ONNX Runtime on the CPU."
        )
    if "triton" in place.servers:
        sizes = ", ".join(map(str, served.preferred_batch_sizes))
        facts.append(
            f"Triton batches up to {served.max_batch_size} samples, prefers batches of {sizes}, "
            f"and lets a sample wait for others for {served.max_queue_delay_us} µs at most. This "
            "follows from the bundle's profile, measured where it was compiled; edit "
            "`config.pbtxt` for another machine."
        )
    if "ovms" in place.servers:
        facts.append(
            "OpenVINO Model Server is set to compute in float32: in bfloat16 samples leave "
            "at other exits than certified."
        )
    return facts


WARMUP: Final = "warmup"
"""Folder with the tensors of warm-up requests for Triton."""
_NEAR_BEST: Final = 1.1
"""Batch sizes are preferred if their time per sample is within this factor of the shortest."""
_DELAY_SHARE: Final = 0.1
"""Longest time that a sample waits in the queue, as a share of the time that the unmodified model
takes for one sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFile:
    """An exported file, as Triton's configuration describes it."""

    name: str
    """Name of the model in the repository."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sample: Mapping[str, NDArray[Any]]
    """Generated inputs of one sample, [1, ...], for warm-up."""
    profile: Profile
    """Profile of the bundle, measured where it was compiled."""
    metadata: Mapping[str, str]
    half_precision: bool
    """True if the weights have half precision: ONNX Runtime then must not optimise beyond the level
    ``extended``."""

    @property
    def max_batch_size(self) -> int:
        """Largest batch that the bundle was profiled with."""
        return self.profile.batch_sizes[-1]

    @property
    def preferred_batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes at which the unmodified model takes about the shortest time per sample."""
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
        """Longest time that a sample waits for other samples, in microseconds."""
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
    """Return the tensors of a warm-up request, by their file names in the model's folder."""
    return {
        f"{WARMUP}/{_file_of(number)}": np.ascontiguousarray(served.sample[tensor.name]).tobytes()
        for number, tensor in enumerate(served.inputs)
    }


def _warmup(served: ServedFile, batch_size: int) -> dict[str, Any]:
    """Describe a warm-up batch: ``batch_size`` requests with the same sample."""
    inputs = {
        tensor.name: messages.ModelWarmup.Input(  # protobuf 5 takes no dict as a map's value
            data_type=_type_of(tensor),
            dims=served.sample[tensor.name].shape[1:] or (1,),
            input_data_file=_file_of(number),
        )
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
    """Return the file name of an input; the input's own name may not be valid as a file name."""
    return f"input_{number}"
