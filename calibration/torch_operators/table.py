"""The ONNX operators that can be trained through, by kind."""

from __future__ import annotations

from collections.abc import Mapping

from offramp.calibration.torch_operators.convolutions import CONVOLUTIONS
from offramp.calibration.torch_operators.elementwise import ELEMENTWISE
from offramp.calibration.torch_operators.indexing import INDEXING
from offramp.calibration.torch_operators.node import TorchOperator
from offramp.calibration.torch_operators.normalisation import NORMALISATION
from offramp.calibration.torch_operators.products import PRODUCTS
from offramp.calibration.torch_operators.recurrent import RECURRENT
from offramp.calibration.torch_operators.reductions import REDUCTIONS
from offramp.calibration.torch_operators.resizing import RESIZING
from offramp.calibration.torch_operators.shapes import SHAPES

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
