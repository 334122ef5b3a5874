"""Values of tensors, which a graph contains, or names in the weight file of its compilation."""

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
    """Return a tensor's value, from the message or from the file of weights.

    ValueError if it has no content, or is in a file and none is in use
    (:func:`offramp.engine.graphs.external_weights.weights_in`).
    """
    if not tensor.external_data:
        return numpy_helper.to_array(tensor)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.frombuffer(named_bytes(tensor), dtype).reshape(tensor.dims)


def named_bytes(tensor: onnx.TensorProto) -> bytes:
    """Return the bytes of a tensor that names them; ValueError if no file is in use."""
    folder = weight_folder()
    if folder is None:
        raise ValueError(f"the weight {tensor.name!r:.100} is in a file, and none is in use here")
    place = named_place(tensor)
    with (folder / WEIGHTS).open("rb") as file:
        file.seek(place.offset)
        return file.read(place.length)


def named_place(tensor: onnx.TensorProto) -> Place:
    """Return the place of a tensor's bytes in the file that it names."""
    told = {entry.key: entry.value for entry in tensor.external_data}
    return Place(offset=int(told["offset"]), length=int(told["length"]))
