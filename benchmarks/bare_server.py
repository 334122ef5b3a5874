"""A minimal inference server on grpc.aio, as a yardstick for the server's front.

    python -m benchmarks.bare_server MODEL.onnx

It checks nothing, and runs each request alone on a thread of ONNX Runtime; one input, one output.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import numpy as np
import onnxruntime
import uvloop

from offramp.proto.descriptors import SERVICE
from offramp.proto.messages import ModelInferRequest, ModelInferResponse
from offramp.proto.tensors import decode_tensors, encode_tensor

THREADS = 2


class BareServer:
    """A server with a model and one method."""

    def __init__(self, path: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(path, options)
        self._output = self._session.get_outputs()[0].name
        self._pool = ThreadPoolExecutor(THREADS)

    async def infer(self, request: Any, _context: object) -> Any:
        """Decode a request, run the model, and encode the answer."""
        inputs = decode_tensors(request.inputs, request.raw_input_contents)
        loop = asyncio.get_running_loop()
        (array,) = await loop.run_in_executor(self._pool, self._session.run, None, inputs)
        response = ModelInferResponse(model_name=request.model_name, id=request.id)
        raw = encode_tensor(response.outputs.add(), self._output, np.asarray(array))
        response.raw_output_contents.append(raw)
        return response


async def serve(path: str) -> None:
    """Serve until killed; the port is the one line on stdout."""
    method = grpc.unary_unary_rpc_method_handler(
        BareServer(path).infer,
        request_deserializer=ModelInferRequest.FromString,
        response_serializer=ModelInferResponse.SerializeToString,
    )
    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler(SERVICE, {"ModelInfer": method})
    server.add_generic_rpc_handlers((handler,))
    sys.stdout.write(f"{server.add_insecure_port('127.0.0.1:0')}\n")
    await server.start()
    sys.stdout.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1]))
