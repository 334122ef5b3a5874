"""The optional backend of OpenVINO on the CPU.

OpenVINO was measured faster than ONNX Runtime on transformers (``benchmarks/other_runtime.py``),
but hardly on small CNNs. Both run the same graphs, in float32 unless a graph specifies another
type: OpenVINO's default is bfloat16 on CPUs that have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from offramp.bundle.optional_imports import optional_import
from offramp.engine.backends.host import HostBackend, LoadedGraph
from offramp.engine.common.errors import BackendError
from offramp.engine.graphs.assembly import ModelProto
from offramp.engine.graphs.external_weights import WeightForm

if TYPE_CHECKING:
    import openvino

_INSTALL = "pip install '.[openvino]' (for the dot: Offramp's source folder or wheel)"


def require_openvino() -> str:
    """Import OpenVINO and return its version; BackendError if that fails."""
    with optional_import("openvino", install=_INSTALL, raises=BackendError):
        import openvino  # noqa: PLC0415 - optional, and slow to import
    return str(openvino.__version__).partition("-")[0]


class OpenVinoBackend(HostBackend):
    """A backend that compiles stages with OpenVINO for the CPU.

    ``streams`` stages run at the same time, each in ``threads`` threads; further ones wait.
    """

    name = "openvino-cpu"
    runtime_name = "OpenVINO"

    def __init__(self, *, threads: int = 1, streams: int = 1) -> None:
        """Start OpenVINO's core; BackendError if OpenVINO is not installed."""
        super().__init__(version=require_openvino(), threads=threads)
        import openvino  # noqa: PLC0415

        self._core = openvino.Core()
        self._settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": streams,
            "INFERENCE_NUM_THREADS": threads * streams,
            "INFERENCE_PRECISION_HINT": "f32",
            "ENABLE_CPU_PINNING": False,  # the threads are ours and also do other work
        }

    def load(
        self,
        model: bytes,
        weights: Path | None = None,  # noqa: ARG002
        form: WeightForm = WeightForm.PACKED,  # noqa: ARG002
    ) -> LoadedGraph:
        """Load a serialised graph; raises OpenVINO's exceptions."""
        compiled = self._core.compile_model(self._core.read_model(model), "CPU", self._settings)
        graph = _Graph(compiled, ModelProto.FromString(model).graph)
        return LoadedGraph(read=graph.read, given=graph.given, execute=graph.execute)


class _Graph:
    """A compiled model, with as many infer requests as have run at the same time."""

    def __init__(self, compiled: openvino.CompiledModel, graph: Any) -> None:
        self._compiled = compiled
        self._idle: list[openvino.InferRequest] = []
        self._inputs = _places(compiled.inputs, graph.input)
        self._outputs = _places(compiled.outputs, graph.output)
        self.read, self.given = self._inputs.keys(), self._outputs.keys()

    def execute(
        self, names: Sequence[str], tensors: Mapping[str, NDArray[Any]], _: None
    ) -> list[NDArray[Any]]:
        """Run once, and copy the outputs: the next run of a request overwrites them."""
        # The request's own methods for arrays by name took twice as long (55 µs).
        try:
            request = self._idle.pop()
        except IndexError:
            request = self._compiled.create_infer_request()
        for name, place in self._inputs.items():
            request.set_input_tensor(place, _tensor(tensors[name]))
        request.infer(share_outputs=True)
        found = [request.get_output_tensor(self._outputs[name]).data.copy() for name in names]
        self._idle.append(request)  # a failed request is not reused
        return found


def _places(ports: Sequence[openvino.ConstOutput], declared: Sequence[Any]) -> dict[str, int]:
    """Return each declared name's index in ``ports``.

    A port may have several names: its own, and those of tensors that OpenVINO optimised away.
    """
    names = {tensor.name for tensor in declared}
    return {name: place for place, port in enumerate(ports) for name in port.get_names() & names}


def _tensor(array: NDArray[Any]) -> openvino.Tensor:
    """Return a tensor on the array's memory, or on a copy where OpenVINO refuses that."""
    import openvino  # noqa: PLC0415 - already loaded

    flags = array.flags
    return openvino.Tensor(array, shared_memory=flags.writeable and flags.c_contiguous)
