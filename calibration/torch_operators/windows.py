"""Where windows of convolutions and pools lie: strides, padding and number along each axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from offramp.calibration.torch_operators.node import GraphNode


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The windows of an operator over the spatial axes of its input, one number an axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    """Padding in front."""
    ends: tuple[int, ...]
    """Padding behind."""

    @classmethod
    def of(cls, node: GraphNode, sizes: Sequence[int], kernel: Sequence[int]) -> Windows:
        """Read a node's attributes, for an input of some spatial sizes."""
        axes = len(kernel)
        strides = tuple(node.get("strides", (1,) * axes))
        dilations = tuple(node.get("dilations", (1,) * axes))
        pads = tuple(node.get("pads", (0,) * (2 * axes)))
        how = node.get("auto_pad", "NOTSET")
        begins, ends = pads[:axes], pads[axes:]
        if how == "VALID":
            begins = ends = (0,) * axes
        elif how != "NOTSET":
            totals = [
                max((-(-size // stride) - 1) * stride + (k - 1) * dilation + 1 - size, 0)
                for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True)
            ]
            begins, ends = halved(totals, more_in_front=how == "SAME_LOWER")
        return cls(
            kernel=tuple(kernel), strides=strides, dilations=dilations, begins=begins, ends=ends
        )

    def overhang(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Count the places that the last windows lack behind the padding, rounding up.

        A window that would begin in the padding behind the input is none.
        """
        found = []
        for axis, size in enumerate(sizes):
            span = (self.kernel[axis] - 1) * self.dilations[axis] + 1
            stride, begin = self.strides[axis], self.begins[axis]
            whole = size + begin + self.ends[axis]
            count = -(-(whole - span) // stride) + 1
            if (count - 1) * stride >= size + begin:
                count -= 1
            found.append(max((count - 1) * stride + span - whole, 0))
        return tuple(found)

    def pad(self, x: Tensor, value: float, extra: Sequence[int] | None = None) -> Tensor:
        """Pad the spatial axes of a tensor, behind by so many ``extra`` places."""
        more = extra or (0,) * len(self.ends)
        amounts = [
            amount
            for begin, end, added in reversed(list(zip(self.begins, self.ends, more, strict=True)))
            for amount in (begin, end + added)
        ]
        return functional.pad(x, amounts, value=value) if any(amounts) else x


def halved(
    totals: Sequence[int], *, more_in_front: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Share padding between both ends; an odd one is put in front or behind."""
    smaller = tuple(total // 2 for total in totals)
    larger = tuple(total - half for total, half in zip(totals, smaller, strict=True))
    return (larger, smaller) if more_in_front else (smaller, larger)
