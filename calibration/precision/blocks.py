"""Matrix products with weights in blocks, each of its own scale: ONNX Runtime's ``MatMulNBits``.

At accuracy level 4 it rounds activations to int8 as well, a row's block by itself, so that no row
depends on another. ONNX Runtime has it for 4 bits on CPUs, and from 1.22 on for 8.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offramp.calibration.precision.graphs import CONTRIB, Editor, Rewrite, make

BLOCK = 128
"""Weights that share a scale; 32 took longer on what was measured."""
_INT8_ACTIVATIONS = 4


def quantise_blocks(editor: Editor, *, bits: int) -> Rewrite:
    """Replace the products that are large enough; ``bits`` of a weight are 4 or 8."""
    rewrite = Rewrite()
    for product in editor.products():
        y = product.node.output[0]
        steps, scales = _in_blocks(product.weight, bits)
        result, bias = editor.with_bias(product)
        inputs = [
            product.activation,
            editor.constant(f"{y}/weight", steps),
            editor.constant(f"{y}/scale", scales),
        ]
        rows, columns = product.weight.shape
        node = make(
            "MatMulNBits",
            inputs,
            [result],
            CONTRIB,
            K=rows,
            N=columns,
            bits=bits,
            block_size=BLOCK,
            accuracy_level=_INT8_ACTIVATIONS,
        )
        rewrite.replaced[y] = [node, *bias]
    return rewrite


def _in_blocks(
    weight: NDArray[np.float32], bits: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Round weights [inputs, outputs] around the middle of uint4 or uint8.

    Gives uint8[outputs, blocks, bytes], two uint4 a byte, low half first; and float32[outputs,
    blocks].
    """
    inputs, outputs = weight.shape
    blocks = -(-inputs // BLOCK)
    padded = np.zeros((outputs, blocks * BLOCK), np.float32)
    padded[:, :inputs] = weight.T
    padded = padded.reshape(outputs, blocks, BLOCK)
    middle = 1 << (bits - 1)
    scales = np.abs(padded).max(axis=2) / np.float32(middle - 1)
    scales = np.where(scales > 0, scales, 1).astype(np.float32)
    steps = np.clip(np.rint(padded / scales[:, :, None]) + middle, 0, 2 * middle - 1)
    steps = steps.astype(np.uint8)
    return (steps if bits == 8 else steps[:, :, ::2] | (steps[:, :, 1::2] << 4)), scales
