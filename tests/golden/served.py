"""Recorded behaviour of ``eeserve``: the bytes of its answers, in every mode, and its errors.

The server is another process, and messages are those of Triton's client, so that nothing of
Offramp's own code is called but the command. Requests are sent one after the other and none has a
deadline that could pass, so no answer depends on times. Where the text of an error is that of
ONNX Runtime or gRPC, only its code is recorded.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf import text_format
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tritonclient.grpc import service_pb2 as triton

ROOT = Path(__file__).parent.parent.parent
_OBSERVED = "--controller=static --no-state"
SERVED_MODES = {
    "leave": "",
    "release": f"{_OBSERVED} --ramp-budget 10",
    "audit": f"{_OBSERVED} --ramp-budget 10",
    "off": "",
}
"""Options of a server, by its mode."""
MODEL, INPUT, OUTPUT = "recorded", "sample", "logits"
SERVICE = "inference.GRPCInferenceService"
ROWS = (0, 1, 2, 5, 8, 13, 400, 1699)
"""Samples that leave at several exits and at the model's end."""
BROKEN = b"\xff\xff"
"""Bytes that are not a message."""
READY = re.compile(r"ready: gRPC on (\S+), status page on (\S+)/,")
START = (
    "import sys; from tests.golden.cases import command; "
    "sys.argv[0] = 'eeserve'; sys.exit(command('eeserve')())"
)
OPTIONS = "--backend=onnxruntime --drain-delay-s=0 --grpc-port=0 --http-port=0"
LIMIT_S = 120.0
COUNTED = ("answers", "exit_threshold", "failures", "forced", "model_info", "promise", "refused")
"""Metrics whose values are recorded; the others depend on times, or on who reads them first."""
Json = dict[str, Any]
Request = triton.ModelInferRequest


def served(mode: str, bundle: Path) -> Json:
    """Return all answers of a server in a mode; of one also its descriptions and errors."""
    with _server(bundle, mode) as (address, url), grpc.insecure_channel(address) as channel:
        found: Json = {
            "infer": {name: _infer(channel, request) for name, request in _requests().items()},
            "stream": {
                name: _stream(channel, requests)
                for name, requests in _streams().items()
                if mode != "audit" or name == "in turn"  # which samples run on, is drawn at random
            },
        }
        if mode == "leave":
            found |= {
                "described": _described(channel),
                "mistakes": {name: _infer(channel, r) for name, r in _mistakes().items()},
                "mistakes in streams": {
                    name: _stream(channel, requests) for name, requests in _mistaken().items()
                },
                "pages": {path: _get(url + path) for path in ("/health/live", "/health/ready")},
            }
        return found | {"metrics": _counts(_get(f"{url}/metrics")[1])}


@contextmanager
def _server(bundle: Path, mode: str) -> Iterator[tuple[str, str]]:
    """Yield the gRPC address and the URL of a server, which is asked to leave in the end."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    line = f"{MODEL}.ee --mode {mode} {OPTIONS} {SERVED_MODES[mode]}"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(bundle, Path(folder, f"{MODEL}.ee"))  # servers write next to it
        log = Path(folder, "log")
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", START, *line.split()],
                stderr=stderr,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": paths},
            )
        try:
            until_s = time.monotonic() + LIMIT_S
            while not (ready := READY.search(log.read_text())):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until_s, "the server did not start in time"
                time.sleep(0.02)
            yield ready[1], ready[2]
            process.terminate()
            assert process.wait(LIMIT_S) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


def _request(rows: Sequence[int] = (0,), *, typed: bool = False, **fields: Any) -> Request:
    """Return a request for samples, raw or with typed contents."""
    request = Request(model_name=MODEL, **fields)
    tensor = request.inputs.add(name=INPUT, datatype="INT64", shape=[len(rows), 1])
    if typed:
        tensor.contents.int64_contents.extend(rows)
    else:
        request.raw_input_contents.append(np.array(rows, np.int64).tobytes())
    return request


def _with(request: Request, where: Any = None, **parameters: Any) -> Request:
    """Return the request with parameters, of the request itself or of one of its tensors."""
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param"}
    for name, value in parameters.items():
        parameter = (where or request).parameters[name]
        setattr(parameter, kinds[type(value)], value)
    return request


def _requests() -> dict[str, Request]:
    wanted = [{"name": OUTPUT}, {"name": OUTPUT}]
    return {
        **{f"row {row}": _request([row]) for row in ROWS},
        "all rows": _request(ROWS, id="a request of many"),
        "typed": _request(ROWS[2:5], typed=True, id="7", model_version="1"),
        "twice the largest batch": _request(range(300, 364)),
        "an output, twice": _request([3, 4], outputs=wanted),
        "parameters": _with(_request([6]), priority=1, timeout=0, other="unknown"),
        "out of range": _request([9, -1]),
    }


def _streams() -> dict[str, list[Request]]:
    in_turn = [_request([row], id=str(row)) for row in ROWS[:3]]
    at_once = {"offramp_decoupled": True}
    return {
        "in turn": [*in_turn, _request(ROWS, id="all")],
        "one at once": [_with(_request([2000], id="late"), **at_once)],
        "all at once": [_with(_request(range(2001, 2011), id="more"), **at_once)],
        "corrected": [_with(_request([0, 76, 77], id="wrong"), **at_once)],
        "with an empty end": [
            _with(_request([2020], id="e"), triton_enable_empty_final_response=True, **at_once)
        ],
        "none": [],
    }


def _mistakes() -> dict[str, Request | bytes]:
    def tensor(**fields: Any) -> Request:
        request = _request([1])
        for name, value in fields.items():
            if name == "shape":
                request.inputs[0].shape[:] = value
            else:
                setattr(request.inputs[0], name, value)
        return request

    def output(name: str = OUTPUT, **parameters: Any) -> Request:
        request = _request([1], outputs=[{"name": name}])
        return _with(request, request.outputs[0], **parameters)

    both, twice, absent, longer = _request([1]), _request([1]), _request([1]), _request([1])
    both.inputs[0].contents.int64_contents.append(1)
    twice.inputs.add().CopyFrom(twice.inputs[0])
    twice.raw_input_contents.append(twice.raw_input_contents[0])
    del absent.inputs[:], absent.raw_input_contents[:]
    longer.raw_input_contents[0] += b"\0"
    elsewhere = _request([1])
    _with(elsewhere, elsewhere.inputs[0], shared_memory_region="mine")
    wrong_field = _request([1])
    del wrong_field.raw_input_contents[:]
    wrong_field.inputs[0].contents.fp32_contents.append(1.0)
    unsigned = _request([1])
    unsigned.parameters["priority"].double_param = 1.5
    return {
        "no model": Request(),
        "unknown model": Request(model_name="resnet"),
        "unknown version": _request([1], model_version="2"),
        "no inputs": absent,
        "an input twice": twice,
        "unknown input": tensor(name="pixels"),
        "unknown datatype": tensor(datatype="INT65"),
        "other datatype": tensor(datatype="FP64"),
        "bytes": tensor(datatype="BYTES"),
        "rank": tensor(shape=[1]),
        "size": tensor(shape=[1, 2]),
        "negative size": tensor(shape=[-1, 1]),
        "no rows": _request([]),
        "too few bytes": tensor(shape=[2, 1]),
        "too many bytes": longer,
        "raw and typed": both,
        "other typed field": wrong_field,
        "input in shared memory": elsewhere,
        "unknown output": output("classes"),
        "classification": output(classification=3),
        "output in shared memory": output(shared_memory_region="mine"),
        "priority": unsigned,
        "negative timeout": _with(_request([1]), timeout=-5),
        "text for a flag": _with(_request([1]), offramp_decoupled="yes"),
        "broken": BROKEN,
    }


def _mistaken() -> dict[str, list[Request | bytes]]:
    at_once = {"offramp_decoupled": True}
    return {
        "between others": [
            _request([1], id="before"),
            Request(model_name="resnet", id="unknown"),
            _request([1], model_version="3", id="version"),
            _request([2], id="after"),
        ],
        "at once": [_with(Request(model_name=MODEL, id="empty"), **at_once)],
        "broken": [BROKEN],
    }


def _described(channel: grpc.Channel) -> Json:
    """Return metadata, configuration, readiness and health, and errors of these."""
    found: Json = {}
    for name, versions in ((MODEL, ("", "1", "2")), ("resnet", ("1",)), ("", ("",))):
        for version in versions:
            for method in ("ModelReady", "ModelMetadata", "ModelConfig"):
                request = getattr(triton, f"{method}Request")(name=name, version=version)
                answer = _call(channel, method, request.SerializeToString())
                found[f"{method} {name or 'nothing'} {version}".strip()] = answer
    for method in ("ServerLive", "ServerReady", "RepositoryIndex"):
        found[method] = _call(channel, method, b"")
    found["broken"] = _call(channel, "ModelMetadata", BROKEN)
    found["ServerMetadata"] = _call(channel, "ServerMetadata", b"", without=("version",))
    for name in ("", MODEL, SERVICE, "resnet"):
        request = health_pb2.HealthCheckRequest(service=name).SerializeToString()
        answer = _call(channel, "grpc.health.v1.Health/Check", request)
        found[f"health of {name or 'all'}"] = answer
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    info = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    (listed,) = info(iter([request.SerializeToString()]), timeout=LIMIT_S)
    found["services"] = _read(reflection_pb2.ServerReflectionResponse, listed)
    return found


def _infer(channel: grpc.Channel, request: Request | bytes) -> Json:
    data = request if isinstance(request, bytes) else request.SerializeToString()
    return _call(channel, "ModelInfer", data)


def _call(channel: grpc.Channel, method: str, data: bytes, *, without: Sequence[str] = ()) -> Json:
    """Return the answer to a call of one message, or its error."""
    path = f"/{method}" if "/" in method else f"/{SERVICE}/{method}"
    try:
        answer, call = channel.unary_unary(path).with_call(data, timeout=LIMIT_S, metadata=SLO)
    except grpc.RpcError as error:
        return _error(error)
    kind = health_pb2.HealthCheckResponse if "/" in method else getattr(triton, f"{method}Response")
    return {**_read(kind, answer, without), **_trailing(call)}


SLO = (("offramp-deadline", "slo"),)
"""Leaves deadlines to the model, which has none."""


def _stream(channel: grpc.Channel, requests: Sequence[Request | bytes]) -> list[Json]:
    """Return all responses of a stream, and its error where it ends with one."""
    given = [r if isinstance(r, bytes) else r.SerializeToString() for r in requests]
    call = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(iter(given), timeout=LIMIT_S)
    found = []
    try:
        found.extend(_read(triton.ModelStreamInferResponse, answer) for answer in call)
    except grpc.RpcError as error:
        found.append(_error(error))
    return found


def _read(kind: type[Message], data: bytes, without: Sequence[str] = ()) -> Json:
    """Return a message as text, the hashes of its tensors and that of all its bytes.

    Maps are put in the order of their keys, as protobuf writes them in any.
    """
    message: Any = kind.FromString(data)
    for name in without:
        message.ClearField(name)
    content = message.SerializeToString(deterministic=True)
    found: Json = {"bytes": [len(content), hashlib.sha256(content).hexdigest()]}
    answer = getattr(message, "infer_response", message)
    if tensors := getattr(answer, "raw_output_contents", ()):
        found["tensors"] = [hashlib.sha256(tensor).hexdigest() for tensor in tensors]
        del answer.raw_output_contents[:]
    return {"message": text_format.MessageToString(message, as_one_line=True), **found}


def _error(error: Any) -> Json:
    return {"code": error.code().name, "details": error.details(), **_trailing(error)}


def _trailing(call: Any) -> Json:
    found = {str(key): str(value) for key, value in call.trailing_metadata() or ()}
    return {"trailing": found} if found else {}


def _get(url: str) -> tuple[int, str]:
    """Return the status and the body of a page."""
    try:
        with urllib.request.urlopen(url, timeout=LIMIT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _counts(page: str) -> list[str]:
    """Return the descriptions of the metrics, and the values of those counted immediately."""
    described = ("# HELP offramp_", "# TYPE offramp_")
    counted = tuple(f"offramp_{name}" for name in COUNTED)
    return [line for line in page.splitlines() if line.startswith((*described, *counted))]
