"""The ONNX operators that can be trained through, by kind."""

from __future__ import annotations

from collections.abc import Mapping

from offramp.calibration.torch_operators.elementwise import ELEMENTWISE, REDUCTIONS
from offramp.calibration.torch_operators.layers import NORMALISATION, PRODUCTS, RECURRENT
from offramp.calibration.torch_operators.node import TorchOperator
from offramp.calibration.torch_operators.shape_operators import INDEXING, SHAPES
from offramp.calibration.torch_operators.spatial import CONVOLUTIONS, RESIZING

OPERATORS: Mapping[str, TorchOperator] = {
    **ELEMENTWISE,
    **SHAPES,
    **INDEXING,
    **REDUCTIONS,
    **CONVOLUTIONS,
    **NORMALISATION,
    **PRODUCTS,
    **RESIZING,
    **RECURRENT,
}
