"""Triton's generate extension: requests in JSON have a field per input, answers one per output.

``generate`` returns the whole answer, ``generate_stream`` one event (server-sent events) per
response. Fields that are not inputs are parameters of the request; responses have parameters, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from offramp.engine.requests.results import ModelInfo
from offramp.proto.messages import ModelInferResponse
from offramp.proto.request_bytes import InferMessage
from offramp.proto.tensors import datatype_of
from offramp.server.rest.json_requests import JsonRequest
from offramp.server.rest.json_responses import write_inference


def read_generate(
    body: Mapping[str, Any], model: ModelInfo, name: str, version: str
) -> InferMessage:
    """Return the message of a JSON body; raise the errors of :class:`.JsonRequest`.

    The value of an input is one element, or a list of elements along its last dimension; all other
    dimensions have size 1.
    """
    given = dict(body)
    inputs = []
    for spec in model.inputs:
        if spec.name not in given:
            continue
        value = given.pop(spec.name)
        data = value if isinstance(value, list) else [value]
        datatype = datatype_of(np.dtype(spec.dtype), spec.name)
        shape = [*[1] * (len(spec.shape) - 1), len(data)]
        inputs.append({"name": spec.name, "datatype": datatype, "shape": shape, "data": data})
    document = {"id": given.pop("id", ""), "inputs": inputs, "parameters": given}
    text = json.dumps(document).encode()
    return JsonRequest(memoryview(text), len(text), name, version).message


def write_generate(response: ModelInferResponse) -> dict[str, Any]:
    """Return a response's fields: parameters and outputs (a list unless it has one element)."""
    document = json.loads(write_inference(response, lambda _: False).data)
    outputs = {each["name"]: each["data"] for each in document.pop("outputs")}
    return {
        **{key: value for key, value in document.items() if key != "parameters"},
        **document.get("parameters", {}),
        **{name: data[0] if len(data) == 1 else data for name, data in outputs.items()},
    }


def write_event(document: Mapping[str, Any]) -> bytes:
    """Return a document as a server-sent event."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"
