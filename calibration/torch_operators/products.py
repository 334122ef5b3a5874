"""Matrix products, sums over named indices, and attention."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from offramp.calibration.torch_operators.node import GraphNode, TorchOperator, operator


def _gemm(node: GraphNode, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.T if node.get("transA", 0) else a
    b = b.T if node.get("transB", 0) else b
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    if not a.is_floating_point():
        alpha, beta = int(alpha), int(beta)
    if c is not None and c.is_floating_point():
        return torch.addmm(c, a, b, beta=beta, alpha=alpha)
    product = a @ b * alpha
    return product if c is None else product + c * beta


def _einsum(node: GraphNode, *inputs: Tensor) -> Tensor:
    return torch.einsum(node.get("equation", ""), *inputs)


def _attention(
    node: GraphNode, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Attend in heads: [b, heads, tokens, width], or [b, tokens, heads * width] to be split."""
    flat = query.ndim == 3
    if flat:
        heads = node.get("q_num_heads", 1), *([node.get("kv_num_heads", 1)] * 2)
        query, key, value = (
            x.reshape(*x.shape[:2], count, -1).transpose(1, 2)
            for x, count in zip((query, key, value), heads, strict=True)
        )
    shared = query.shape[1] // key.shape[1]  # heads of queries that share one of keys
    key, value = (x.repeat_interleave(shared, 1) if shared > 1 else x for x in (key, value))
    scale = node.get("scale", 1 / math.sqrt(query.shape[-1]))
    scores = (query * math.sqrt(scale)) @ (key * math.sqrt(scale)).transpose(-1, -2)
    cap = node.get("softcap", 0.0)
    if cap:
        scores = torch.tanh(scores / cap) * cap
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    if node.get("is_causal", 0):
        tokens = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(~tokens.tril(), -math.inf)
    # a token that may see none gets zeros, and neither it nor its gradient is NaN
    blind = torch.isneginf(scores).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    attended = weights.to(value.dtype) @ value
    return attended.transpose(1, 2).flatten(2) if flat else attended


_KNOWN = {"is_causal", "kv_num_heads", "q_num_heads", "scale", "softcap"}
_WITHOUT_EFFECT = {"qk_matmul_output_mode", "softmax_precision"}


def _attention_lacks(node: GraphNode) -> str | None:
    other = sorted(node.attributes.keys() - _KNOWN - _WITHOUT_EFFECT)
    if other:
        return f"with {', '.join(other)}"
    if any(node.reads(index) for index in (4, 5, 6)):
        return "with past keys, past values or lengths"
    if any(node.writes(index) for index in (1, 2, 3)):
        return "with more outputs than the attended values"
    return None


def _rotary_embedding(
    node: GraphNode, x: Tensor, cosines: Tensor, sines: Tensor, places: Tensor | None = None
) -> Tensor:
    """Turn pairs of coordinates by angles of their place; [b, heads, tokens, width] or as above."""
    flat = x.ndim == 3
    if flat:
        x = x.reshape(*x.shape[:2], node.get("num_heads", 1), -1).transpose(1, 2)
    turned = node.get("rotary_embedding_dim", 0) or x.shape[-1]
    if places is not None:
        cosines, sines = cosines[places], sines[places]
    cosines, sines = (table[:, None, :, : turned // 2] for table in (cosines, sines))
    paired = node.get("interleaved", 0)
    moved, rest = x[..., :turned], x[..., turned:]
    first, second = (moved[..., ::2], moved[..., 1::2]) if paired else moved.chunk(2, -1)
    real, imaginary = first * cosines - second * sines, first * sines + second * cosines
    if paired:
        joined = torch.stack([real, imaginary], -1).flatten(-2)
    else:
        joined = torch.cat([real, imaginary], -1)
    y = torch.cat([joined, rest], -1)
    return y.transpose(1, 2).flatten(2) if flat else y


PRODUCTS: Mapping[str, TorchOperator] = {
    "Attention": operator(_attention, lacks=_attention_lacks),
    "Einsum": operator(_einsum),
    "Gemm": operator(_gemm),
    "MatMul": operator(lambda _, a, b: a @ b),
    "RotaryEmbedding": operator(_rotary_embedding),
}
