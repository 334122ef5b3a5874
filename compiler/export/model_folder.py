"""The folder of an exported model in a repository: the file, its configuration, and a README."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from offramp import __version__
from offramp.bundle import Bundle, TensorSpec
from offramp.compiler.export.repositories import MODEL, README, WRITTEN_BY, Repository
from offramp.compiler.export.triton import ServedFile, config_text, warmup_files
from offramp.compiler.export.verification import has_half_precision
from offramp.compiler.graphs.nesting import METADATA, Names
from offramp.compiler.graphs.runtime import random_inputs

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
"""What `eeserve` does with a bundle and another server does not do with its export."""

_FILES: Final = {
    "1/model.onnx": ("the model, with exits inside", {"triton", "ovms"}),
    "config.pbtxt": ("Triton's configuration", {"triton"}),
    "warmup/": ("made inputs, which Triton runs when it loads the model", {"triton"}),
    "../config.json": ("the models that OpenVINO Model Server loads", {"ovms"}),
    "../{name}.kserve.yaml": ("what KServe runs Triton by", {"kserve"}),
}
"""What each file is for, and which servers read it."""
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
    bundle: Bundle, place: Repository, model: onnx.ModelProto, content: bytes, names: Names
) -> dict[str, bytes]:
    """Return the files of the model's folder, by relative path.

    ``content`` is the serialised ``model``, and ``names`` are those that exporting added.
    """
    served = _describe(bundle, place.name, model, names)
    files = {MODEL: content, README: _readme(bundle, place, served).encode()}
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
        half_precision=has_half_precision(model.graph),
    )


def _made_sample(bundle: Bundle) -> dict[str, NDArray[Any]]:
    """Make inputs of one sample, [1, ...], of the sizes that calibration data had.

    They are not taken from the data, which may be private.
    """
    source = onnx.load_model_from_string(bundle.read(bundle.manifest.source.file))
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
            f"end; `{confidence.name}` is how sure that answer is, from 0 to 1."
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
            "OpenVINO Model Server is told to compute in float32, as with bfloat16 samples leave "
            "at other exits than those that were certified."
        )
    return facts
