"""Tables of ``docs/protocol.md``: each method and route of the protocol, compared with Triton's.

``python -m tests.protocol_table`` writes them into the document, from the schema, the routes and
the remarks here; a test keeps the document equal to them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from offramp.proto.descriptors import FILE, SERVICE
from offramp.server.rest.routes import GENERATE_PATHS, INFER_PATHS, ROUTES

DOCUMENT: Final = Path(__file__).parents[1] / "docs" / "protocol.md"

REMARKS: Final[Mapping[str, str]] = {
    "ServerLive": "not live once no loaded model could be served for 60 s, so that the process is "
    "started again; Triton is live as long as it answers. The ports open once the models of the "
    "start are loaded: until then there is no answer, where Triton is live; give Kubernetes a "
    "startup probe",
    "ServerReady": "as Triton, whose strict readiness is the default; a model that could not be "
    "loaded at the start makes the server not ready, one that is added later does not",
    "ModelReady": "as Triton: `false`, not an error, for a model that is not there",
    "ServerMetadata": "extensions are those that are implemented",
    "ModelMetadata": "as Triton; the platform is `offramp_` and the backend",
    "ModelConfig": "the fields that clients read: name, platform, batch size, inputs, outputs, "
    "decoupled or not. The others describe Triton's own scheduling",
    "ModelInfer": "as Triton, of [one output](howto/moving.md#models-with-several-outputs), with "
    "`offramp_exits`, `offramp_confidences` and `offramp_policy_version` among the parameters. No "
    "BF16 as inputs: no model that Offramp compiles has them; strings (BYTES) are the prompts of "
    "models that generate text. Sequence parameters are not read: no model has a state",
    "ModelStreamInfer": "one response per request, in their order, as Triton; with "
    "`offramp_decoupled` an early answer and a final one. Models that generate text are decoupled: "
    "a response per token, the last with `offramp_end`",
    "ModelStatistics": "`response_stats` by exit; `compute_infer` is the time from a request's "
    "first batch to its answer. `batch_stats` is empty: batches shrink from stage to stage",
    "RepositoryIndex": "as Triton; states READY, LOADING, UNLOADING, UNAVAILABLE",
    "RepositoryModelLoad": "`config` takes keys of `[models.NAME]`, not Triton's configuration; "
    "files cannot be sent, since bundles are checked as a whole",
    "RepositoryModelUnload": "as Triton; requests that came before are answered",
    "SystemSharedMemoryStatus": "as Triton",
    "SystemSharedMemoryRegister": "as Triton; a region must be as long as it is said to be",
    "SystemSharedMemoryUnregister": "as Triton",
    "CudaSharedMemoryStatus": "always empty",
    "CudaSharedMemoryRegister": "UNIMPLEMENTED: requests are scheduled as numpy arrays of the host",
    "CudaSharedMemoryUnregister": "does nothing",
    "TraceSetting": "`trace_level` OFF or TIMESTAMPS and `trace_rate`, for all models together; "
    "the others cannot be changed",
    "LogSettings": "`log_file` and `log_format` cannot be changed while the server runs (Triton: "
    "`log_file`)",
}
"""Comparison with Triton 2.51 by method, with a reason for each difference."""


def methods() -> str:
    """Return the table of gRPC methods."""
    names = [m.name for m in FILE.services_by_name[SERVICE.rpartition(".")[2]].methods]
    rows = [f"| `{name}` | {REMARKS[name]} |" for name in names]
    return "\n".join(["| method | compared with Triton |", "|---|---|", *rows])


def routes() -> str:
    """Return the table of HTTP routes."""
    rows = [f"| POST | `{path}` | `ModelInfer` |" for path in INFER_PATHS]
    for path in GENERATE_PATHS:
        rows.append(f"| POST | `{path}` | `ModelInfer` |")
        rows.append(f"| POST | `{path}_stream` | `ModelStreamInfer` |")
    rows += [f"| {route.verb} | `{route.path}` | `{route.method}` |" for route in ROUTES]
    return "\n".join(["| | route | method |", "|---|---|---|", *rows])


def with_tables(text: str) -> str:
    """Return the document with its tables replaced."""
    for name, table in (("methods", methods()), ("routes", routes())):
        text, count = re.subn(
            rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", rf"\g<1>{table}\g<2>", text, flags=re.DOTALL
        )
        assert count == 1, f"{DOCUMENT.name} has no place for {name}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
