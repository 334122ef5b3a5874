"""What this machine's CPU has for integers and floats of 16 bits: facts for messages and reports.

Nothing is decided by them: kinds are measured (:mod:`.choice`).
"""

from __future__ import annotations

import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

_CPUINFO = Path("/proc/cpuinfo")
_OF_INTEREST = {
    "avx2": "AVX2",
    "avx512f": "AVX512",
    "avx_vnni": "AVX_VNNI",
    "avx512_vnni": "AVX512_VNNI",
    "avx_vnni_int8": "AVX_VNNI_INT8",
    "amx_int8": "AMX_INT8",
    "avx512_bf16": "AVX512_BF16",
    "amx_bf16": "AMX_BF16",
    "avx512_fp16": "AVX512_FP16",
    "amx_fp16": "AMX_FP16",
    "asimddp": "DOTPROD",
    "i8mm": "I8MM",
    "bf16": "BF16",
    "asimdhp": "FP16",
}
"""Linux's words, and the vendors'."""
_SUMS_IN_INT32 = {"AVX_VNNI", "AVX512_VNNI", "AVX_VNNI_INT8", "AMX_INT8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFeatures:
    """Instructions of a CPU that its precision depends on."""

    machine: str
    """Of Python's ``platform.machine()``."""
    names: tuple[str, ...] | None
    """Those of interest that it has; ``None`` where that is not known."""

    @property
    def saturates(self) -> bool | None:
        """Whether products of uint8 and int8 may be clipped to int16; ``None`` if not known.

        Without VNNI, x86 adds pairs of them in int16: weights of 8 bits overflow there, and int8
        agrees less than it does elsewhere.
        """
        if self.names is None:
            return None
        return self.machine in {"x86_64", "AMD64"} and _SUMS_IN_INT32.isdisjoint(self.names)

    def describe(self) -> str:
        """Say it in a line."""
        if self.names is None:
            return f"{self.machine}, instructions unknown (no /proc/cpuinfo)"
        return f"{self.machine} with {', '.join(self.names) or 'none of interest'}"


def cpu_features(cpuinfo: Path = _CPUINFO) -> CpuFeatures:
    """Read what the CPU has from Linux's ``/proc/cpuinfo``; unknown elsewhere."""
    machine = platform.machine()
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return CpuFeatures(machine=machine, names=None)
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in {"flags", "Features"}:
            flags = set(value.split())
            names = tuple(name for flag, name in _OF_INTEREST.items() if flag in flags)
            return CpuFeatures(machine=machine, names=names)
    return CpuFeatures(machine=machine, names=None)


def computes_natively(elem_type: int) -> bool:
    """Whether ONNX Runtime's CPU provider multiplies matrices of a type in that type.

    ``elem_type`` is one of ONNX's, such as ``TensorProto.FLOAT16``. Tried, not looked up: a product
    of that type is optimised for this machine. On x86, ONNX Runtime 1.31 wraps float16 in casts
    to float32 and back, and refuses bfloat16, whatever instructions the CPU has.
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
    """Whether float16 and bfloat16 are computed natively, by name."""
    types = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
    return {name: computes_natively(elem_type) for name, elem_type in types.items()}
