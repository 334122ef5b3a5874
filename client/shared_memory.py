"""Shared memory through which a client on the server's machine sends inputs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offramp.client.errors import InvalidInputError
from offramp.proto.messages import ModelInferRequest

_ALIGNED_TO: Final = 64
"""Alignment of tensors, in bytes."""


def aligned(size_bytes: int) -> int:
    """Return the aligned size that a tensor takes."""
    return -(-size_bytes // _ALIGNED_TO) * _ALIGNED_TO


class SharedInputs:
    """A region of shared memory for the inputs of one request at a time.

    ::

        with client.shared_inputs(64 * 2**20) as region:
            result = client.infer("model", {"image": images}, shared=region)
    """

    def __init__(self, size_bytes: int) -> None:
        """Create a region with a random name; ``size_bytes`` must hold all inputs of a request."""
        self._memory = SharedMemory(
            name=f"offramp-{secrets.token_hex(8)}", create=True, size=size_bytes
        )
        self.name: Final = self._memory.name
        """Name of the region, here and on the server."""
        self.key: Final = f"/{self.name}"
        """Key by which the server opens the region (``shm_open``)."""
        self.size_bytes: Final = size_bytes

    def place(self, request: ModelInferRequest, inputs: Mapping[str, ArrayLike]) -> None:
        """Write arrays to the region, and their offsets into the request's inputs.

        Raises:
            InvalidInputError: The arrays do not fit.
        """
        offset = 0
        for tensor in request.inputs:
            offset = self.put(tensor, np.ascontiguousarray(inputs[tensor.name]), offset)

    def put(
        self, tensor: ModelInferRequest.InferInputTensor, array: NDArray[Any], offset: int
    ) -> int:
        """Write an array at an offset, and the offset into the input; return the next free one.

        Raises:
            InvalidInputError: The array does not fit.
        """
        self._write(tensor.name, array, offset)
        tensor.parameters["shared_memory_region"].string_param = self.name
        tensor.parameters["shared_memory_offset"].int64_param = offset
        tensor.parameters["shared_memory_byte_size"].int64_param = array.nbytes
        return offset + aligned(array.nbytes)

    def close(self) -> None:
        """Close and remove the region; the server must not use it any more."""
        self._memory.close()
        self._memory.unlink()

    def _write(self, name: str, array: NDArray[Any], offset: int) -> None:
        if offset + array.nbytes > self.size_bytes:
            raise InvalidInputError(
                f"input {name!r} ends at byte {offset + array.nbytes} of shared memory of "
                f"{self.size_bytes} bytes; make the region larger"
            )
        target: NDArray[Any] = np.ndarray(
            array.shape, array.dtype.newbyteorder("<"), self._memory.buf, offset
        )
        target[...] = array
        del target  # the memory cannot be closed while an array refers to it
