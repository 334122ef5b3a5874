"""Benefit of int8 on this machine: kinds compared with float32, in interleaved rounds.

    python -m benchmarks.precision MODEL.onnx --data CALIBRATION.npz [--judge TEST.npz]
        [--samples 500] [--batch-sizes 1 16] [--threads 1] [--seconds 20] [--json FILE]

Ratios are of times in the same round, medians with the interval of order statistics. Agreement is
with float32's largest class, on samples not used for the scales. ``depends`` is the difference of
answers between batches, as a share of the largest one. Accuracies are not compared, even with
``--judge`` and labels: a kind should answer as the source model does.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from benchmarks.common import make_parser
from onnx import TensorProto, helper

from offramp.calibration.data.dataset import Dataset, read_dataset
from offramp.calibration.precision.choice import KindMeasured, PrecisionChoice, choose_kind
from offramp.calibration.precision.kinds import CpuPrecision
from offramp.compiler.frontend.model import read_model
from offramp.engine.common.environment import cpu_features
from offramp.engine.common.timing import Effort
from offramp.tools.bench.common.output import check_outputs, describe_environment, write_json

SEED = 0


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path, help="float32 ONNX file")
    parser.add_argument(
        "--data", type=Path, required=True, help=".npz of samples on which scales are measured"
    )
    parser.add_argument(
        "--judge",
        type=Path,
        help=".npz of samples on which answers are compared (default: other samples of --data)",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=500,
        help="largest number of samples on which answers are compared",
    )
    parser.add_argument(
        "--scale-samples",
        type=int,
        default=256,
        help="number of samples on which scales are measured",
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--least-agreement", type=float, default=0.98)
    parser.add_argument("--kinds", nargs="+", choices=[k.value for k in CpuPrecision])
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="seconds in which each kind is timed"
    )
    arguments = parser.parse_args()
    check_outputs(arguments.json)
    model = read_model(arguments.model)
    calibration, judged = samples_of(arguments, read_dataset(arguments.data, model.inputs))
    if arguments.judge:
        judged = read_dataset(arguments.judge, model.inputs)
        judged = judged.subset(np.arange(min(arguments.samples, len(judged))))
    choice = choose_kind(
        model.proto.SerializeToString(),
        model.answer.output,
        calibration,
        judged,
        threads=arguments.threads,
        least_agreement=arguments.least_agreement,
        saturating=cpu_features().saturates is True,
        batch_sizes=sorted(arguments.batch_sizes),
        kinds=[CpuPrecision(name) for name in arguments.kinds or CpuPrecision],
        effort=Effort(least=6, most=400, seconds=arguments.seconds, half_width=0.002),
    )
    show(choice, arguments.least_agreement)
    environment = describe_environment(
        model=arguments.model.name,
        model_sha256=hashlib.sha256(arguments.model.read_bytes()).hexdigest(),
        cpu_features=cpu_features().describe(),
        native=half_precision(),
        threads=arguments.threads,
        scale_samples=len(calibration),
        least_agreement=arguments.least_agreement,
        seed=SEED,
    )
    write_json(
        arguments.json,
        {
            "rows": [facts(result, arguments.least_agreement) for result in choice.measured],
            "not_applicable": {k.value: why for k, why in choice.not_applicable.items()},
            "choice": choice.kind.value if choice.kind else None,
            "reason": choice.reason,
            "disturbed": choice.disturbed,
            "environment": environment,
        },
    )


def samples_of(arguments: Any, dataset: Dataset) -> tuple[Dataset, Dataset]:
    """Return some samples to measure scales on, and others to compare answers on."""
    order = np.random.default_rng(SEED).permutation(len(dataset))
    measured = order[: arguments.scale_samples]
    others = order[arguments.scale_samples :][: arguments.samples]
    return dataset.subset(np.sort(measured)), dataset.subset(np.sort(others))


def show(choice: PrecisionChoice, least_agreement: float) -> None:
    """Print one line for each kind."""
    for result in choice.measured:
        against = result.objection(least_agreement) or "fine"
        print(f"{result.describe()}, depends {result.dependence.difference:.0e}: {against}")
    for why in choice.not_applicable.values():
        print(f"not here: {why}")
    for note in choice.disturbed:
        print(f"disturbed: {note}")
    print(f"chosen: {choice.kind.value if choice.kind else 'float32'} ({choice.reason})")


def facts(result: KindMeasured, least_agreement: float) -> dict[str, Any]:
    """Return the measurements of a kind, as JSON values."""
    return {
        "kind": result.kind.value,
        "what": result.kind.facts.what,
        "ratios": {
            str(size): {"value": r.value, "half_width": r.half_width, "rounds": r.rounds}
            for size, r in result.ratios.items()
        },
        "agreement": result.agreement,
        "samples": result.samples,
        "batch_mates": {
            "difference": result.dependence.difference,
            "changed": result.dependence.changed,
            "rows": result.dependence.rows,
        },
        "size_bytes": result.size_bytes,
        "objection": result.objection(least_agreement),
    }


def computes_natively(elem_type: int) -> bool:
    """Return True if ONNX Runtime's CPU provider multiplies matrices of a type natively.

    ``elem_type`` is one of ONNX's, such as ``TensorProto.FLOAT16``. It is tested: a product of that
    type is optimised for this machine. On x86, ONNX Runtime 1.31 wraps float16 in casts to float32
    and back, and rejects bfloat16, whatever instructions the CPU has.
    """
    one = helper.make_node("MatMul", ["a", "b"], ["c"])
    a, b, c = (helper.make_tensor_value_info(name, elem_type, [4, 4]) for name in "abc")
    graph = helper.make_graph([one], "product", [a, b], [c])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        try:
            ort.InferenceSession(
                model.SerializeToString(),
                options,
                providers=["CPUExecutionProvider"],
                enable_fallback=0,
            )
        except Exception:  # ONNX Runtime's own classes derive from Exception only
            return False
        optimised = onnx.load(options.optimized_model_filepath)
    return all(node.op_type != "Cast" for node in optimised.graph.node)


def half_precision() -> dict[str, bool]:
    """Return whether float16 and bfloat16 are computed natively, by name."""
    types = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
    return {name: computes_natively(elem_type) for name, elem_type in types.items()}


if __name__ == "__main__":
    main()
