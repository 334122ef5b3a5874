"""Cut tensors, as heads see them: vectors, tokens, maps, and sets of these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

Form: TypeAlias = Literal["vector", "tokens", "map", "set"]
"""What a cut tensor is to heads: [batch, width]; [batch, tokens, width]; channels over one, two or
three dimensions of a signal, an image or a video; several of these."""
_READ = frozenset({"float16", "float32", "float64", "bfloat16"})
"""numpy's names of the element types that heads read."""
_RANKS = range(2, 6)
"""Dimensions of the cut tensors that there are heads for, with the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTensor:
    """The tensor at a cut point, which the heads of an exit read, and others beside it."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    """First the batch; then channels and map, or map and channels, or tokens and width, or
    width."""
    channels: int | None = None
    """The dimension that holds the channels, or a token's width. ``None``: as is usual for the
    rank, which is the first after the batch for maps of two and three dimensions, else the
    last."""
    mask: str | None = None
    """Graph input [batch, tokens] that says which tokens count, if there is one."""
    mask_dtype: str = "int64"
    answers_last: bool = False
    """Whether the model answers by its last token that counts, as decoders do: the first one of
    them sees no other."""
    is_answer: bool = False
    """Whether it is the quantised model's own answer, which needs no head."""
    beside: tuple[CutTensor, ...] = ()
    """The other tensors of the cut point, where it has several."""

    @property
    def tensors(self) -> tuple[CutTensor, ...]:
        """All tensors of the cut point, each by itself."""
        return (replace(self, beside=()) if self.beside else self, *self.beside)

    @property
    def read(self) -> tuple[CutTensor, ...]:
        """Those that heads read; others are carried only."""
        return tuple(t for t in self.tensors if t.dtype in _READ and not why_no_head(t))

    @property
    def rank(self) -> int:
        """Number of dimensions, with the batch."""
        return len(self.shape)

    @property
    def channel_axis(self) -> int:
        """The dimension that holds the channels, or a token's width."""
        usual = 1 if self.rank > 3 else self.rank - 1
        return usual if self.channels is None else self.channels

    @property
    def form(self) -> Form | None:
        """What the cut is to heads; ``None`` where there is no kind of head for it."""
        return "set" if self.beside else self.own_form

    @property
    def own_form(self) -> Form | None:
        """What the tensor is, whatever is beside it."""
        if self.rank not in _RANKS or self.channel_axis not in (1, self.rank - 1):
            return None
        if self.rank == 2:
            return "vector"
        return "tokens" if self.rank == 3 and self.channel_axis == 2 else "map"

    @property
    def width(self) -> int:
        """Channels, or size of a token or vector; 0 where it is symbolic."""
        size = self.shape[self.channel_axis]
        return size if isinstance(size, int) else 0

    @property
    def sides(self) -> tuple[int | str, ...]:
        """Sizes of a map: its height and width, say."""
        return tuple(
            size for axis, size in enumerate(self.shape) if axis not in (0, self.channel_axis)
        )


def why_no_head(cut: CutTensor) -> str:
    """Say what a head lacks in a cut tensor; empty where one can be built."""
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
