"""onnxslim in a separate process, which can be stopped and returns its memory at the end.

python -m offramp.compiler.frontend.simplifier MODEL.onnx SIMPLER.onnx [SKIPPED,…]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import onnx
import onnxslim
from onnx.external_data_helper import load_external_data_for_model

from offramp.compiler.common.resources import count_process, peak_bytes
from offramp.compiler.graphs.graph import bodies, copied
from offramp.compiler.graphs.weights import check_standard
from offramp.engine.common.job_runner import environment_of_child

LIMIT_S: Final = 180.0
"""Default for the largest number of seconds that simplifying may take."""
# -P: modules of the working directory are not imported.
COMMAND: Final = (sys.executable, "-P", "-m", "offramp.compiler.frontend.simplifier")
_SMALL_OPERATORS = 300
"""Number of operators up to which simplifying is faster than starting a process."""


class SimplifierError(Exception):
    """Simplifying failed, or did not end in time; the message has the reason."""


def slim(
    proto: onnx.ModelProto,
    skipped: Sequence[str],
    *,
    folder: Path | None,
    limit_s: float = LIMIT_S,
) -> onnx.ModelProto:
    """Simplify a model, which is not changed, without onnxslim's ``skipped`` optimisations.

    ``folder`` contains the model's weight file, if there is one. A small model without loops or
    named weights is simplified in this process, other models by :data:`COMMAND`. SimplifierError if
    simplifying fails, or if the process takes longer than ``limit_s`` seconds.
    """
    nodes = proto.graph.node
    if folder is None and len(nodes) <= _SMALL_OPERATORS and not any(map(bodies, nodes)):
        return _slim(copied(proto), skipped)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        given, made = Path(own, "model.onnx"), Path(own, "simpler.onnx")
        given.write_bytes(proto.SerializeToString())
        command = [*COMMAND, str(given), str(made), ",".join(skipped)]
        _run(command, limit_s, folder)
        return onnx.load(made, load_external_data=False)


def _run(command: Sequence[str], limit_s: float, folder: Path | None) -> None:
    try:
        # Any exception in this call ends the process, too.
        done = subprocess.run(  # noqa: S603
            command,
            timeout=limit_s,
            cwd=folder,
            env=environment_of_child(),
            capture_output=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SimplifierError(
            f"onnxslim did not end within the {limit_s:g} s of --simplify-limit"
        ) from error
    if done.stdout.strip().isdigit():
        count_process(int(done.stdout))
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip().splitlines()
        reason = told[-1] if told else f"it ended with status {done.returncode}"
        raise SimplifierError(f"onnxslim fails: {reason}")


def _slim(proto: onnx.ModelProto, skipped: Sequence[str]) -> onnx.ModelProto:
    try:
        slimmed: onnx.ModelProto = onnxslim.slim(proto, skip_optimizations=list(skipped))
        check_standard(slimmed)
    except Exception as error:  # any error of a third party's optimiser
        raise SimplifierError(f"onnxslim fails: {error}") from error
    return slimmed


def main() -> None:
    """Simplify a file, and print this process's peak memory in bytes.

    Weights in a file are read from the current folder, if they are needed.
    """
    given, made, skipped = sys.argv[1:]
    proto = onnx.load(given, load_external_data=False)
    if not _keeps_names():
        load_external_data_for_model(proto, ".")
    slimmed = onnxslim.slim(proto, skip_optimizations=[s for s in skipped.split(",") if s])
    Path(made).write_bytes(slimmed.SerializeToString())
    sys.stdout.write(f"{peak_bytes() or 0}\n")


def _keeps_names() -> bool:
    """Let onnxslim keep unchanged weights in their file; return whether this version of it can.

    Without this change, onnxslim would also mark the weights that it computes as external.
    """
    try:
        from onnxslim.third_party.onnx_graphsurgeon.exporters import (  # noqa: PLC0415
            onnx_exporter,
        )

        exporter = onnx_exporter.OnnxExporter
        export = exporter.export_tensor_proto
    except (ImportError, AttributeError):  # another version
        return False

    def corrected(tensor: Any) -> onnx.TensorProto:
        made: onnx.TensorProto = export(tensor)
        if not made.external_data:
            made.ClearField("data_location")
        return made

    exporter.export_tensor_proto = staticmethod(corrected)
    return True


if __name__ == "__main__":
    main()
