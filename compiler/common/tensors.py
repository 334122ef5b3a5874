"""Values of tensors: they are in the graph, or in the weight file of the compilation."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from offramp.bundle.graph_weights import WEIGHTS
from offramp.bundle.onnx_wire import Place
from offramp.engine.graphs.external_weights import weight_folder


def array_of(tensor: onnx.TensorProto) -> NDArray[Any]:
    """Return a tensor's value, from the graph or from the file of weights.

    ValueError if the tensor has no content, or if its content is in a file and no file is in use
    (:func:`offramp.engine.graphs.external_weights.weights_in`).
    """
    if not tensor.external_data:
        return numpy_helper.to_array(tensor)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.frombuffer(named_bytes(tensor), dtype).reshape(tensor.dims)


def named_bytes(tensor: onnx.TensorProto) -> bytes:
    """Return a tensor's bytes from the file that it names; ValueError if no file is in use."""
    folder = weight_folder()
    if folder is None:
        raise ValueError(f"the weight {tensor.name!r:.100} is in a file, and none is in use here")
    place = named_place(tensor)
    with (folder / WEIGHTS).open("rb") as file:
        file.seek(place.offset)
        return file.read(place.length)


def named_place(tensor: onnx.TensorProto) -> Place:
    """Return where a tensor's bytes are in the weight file that the tensor refers to."""
    told = {entry.key: entry.value for entry in tensor.external_data}
    return Place(offset=int(told["offset"]), length=int(told["length"]))
