"""Cut tensors as inputs of heads: vectors, tokens, maps, and sets of these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

Form: TypeAlias = Literal["vector", "tokens", "map", "set"]
"""Form of a cut tensor. ``vector``: [batch, width]; ``tokens``: [batch, tokens, width]; ``map``:
channels over one, two or three dimensions of a signal, an image or a video; ``set``: several of
these."""
_READ = frozenset({"float16", "float32", "float64", "bfloat16"})
"""numpy's names of the element types that heads read."""
_RANKS = range(2, 6)
"""Numbers of dimensions, including the batch, of cut tensors that heads can read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTensor:
    """The tensor at a cut point, which an exit's heads read, with the point's other tensors."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    """Sizes of the dimensions: the batch, then channels and map, or map and channels, or tokens and
    width, or a vector's width."""
    channels: int | None = None
    """Dimension that holds the channels, or a token's width. ``None`` means the usual dimension for
    the rank: the first after the batch for maps of two and three dimensions, else the last."""
    mask: str | None = None
    """Graph input [batch, tokens] that marks the tokens that count, if there is one."""
    mask_dtype: str = "int64"
    answers_last: bool = False
    """True if the model answers by its last token that is not padding, like decoders: their first
    token sees no other token."""
    is_answer: bool = False
    """True if this tensor is the quantised model's answer, which needs no head."""
    beside: tuple[CutTensor, ...] = ()
    """Other tensors of the cut point, where it has several."""

    @property
    def tensors(self) -> tuple[CutTensor, ...]:
        """All tensors of the cut point, as separate cut tensors."""
        return (replace(self, beside=()) if self.beside else self, *self.beside)

    @property
    def read(self) -> tuple[CutTensor, ...]:
        """Tensors that heads read; other tensors of the cut point only pass through."""
        return tuple(t for t in self.tensors if t.dtype in _READ and not why_no_head(t))

    @property
    def rank(self) -> int:
        """Number of dimensions, including the batch."""
        return len(self.shape)

    @property
    def channel_axis(self) -> int:
        """Dimension that holds the channels, or a token's width."""
        usual = 1 if self.rank > 3 else self.rank - 1
        return usual if self.channels is None else self.channels

    @property
    def form(self) -> Form | None:
        """Form of the tensors of the cut point; ``None`` if no kind of head can read them."""
        return "set" if self.beside else self.own_form

    @property
    def own_form(self) -> Form | None:
        """Form by the shape of this tensor alone; ``None`` if heads cannot read it."""
        if self.rank not in _RANKS or self.channel_axis not in (1, self.rank - 1):
            return None
        if self.rank == 2:
            return "vector"
        return "tokens" if self.rank == 3 and self.channel_axis == 2 else "map"

    @property
    def width(self) -> int:
        """Number of channels, or size of a token or vector; 0 if it is symbolic."""
        size = self.shape[self.channel_axis]
        return size if isinstance(size, int) else 0

    @property
    def sides(self) -> tuple[int | str, ...]:
        """Sizes of a map, such as its height and width."""
        return tuple(
            size for axis, size in enumerate(self.shape) if axis not in (0, self.channel_axis)
        )


def why_no_head(cut: CutTensor) -> str:
    """Return why no head can read a cut tensor, with a remedy; empty if one can."""
    if cut.rank not in _RANKS:
        most = _RANKS.stop - 1
        return (
            f"it has {cut.rank} dimensions, and heads read {_RANKS.start} to {most}; let the model "
            "join some of them there, as a Reshape does"
        )
    if cut.form is None:
        return (
            f"its channels are dimension {cut.channel_axis} of {cut.rank}, and heads read them as "
            "the first after the batch, or as the last; let the model transpose it there"
        )
    if not cut.width:
        return (
            f"dimension {cut.channel_axis}, which holds its channels, has no fixed size that a "
            "head could be trained for; export the model with that size fixed"
        )
    return ""
