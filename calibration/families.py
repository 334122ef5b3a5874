"""Which heads are tried at a cut point (findings 3, "The head decides").

Apparate 3.1 pools globally and adds one linear layer. A coarse grid instead of global pooling
keeps where things are, a small hidden layer adds the rest, and learned attention queries pool
tokens far better than any fixed rule.

Attention over maps was tried on the Fashion-MNIST example (four queries over a 7×7 grid): it netted
13 % at the first exit where the grid itself netted 64 %, and less than it at every other exit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offramp.bundle import Head

HIDDEN = 128
"""Width of the hidden layer."""
QUERIES = (1, 4)
"""Numbers of learned attention queries that are tried."""
MAX_FEATURES = 2048
"""Grids with more pooled values than this are not tried: a hidden layer behind them has a megabyte
of weights, and a batch of one waits for all of them to be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTensor:
    """What a head sees."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    """First the batch; then channels and map, or tokens and width, or width."""
    mask: str | None = None
    """Graph input [batch, tokens] that says which tokens count, if there is one."""
    mask_dtype: str = "int64"

    @property
    def rank(self) -> int:
        """Dimensions, with the batch."""
        return len(self.shape)

    @property
    def width(self) -> int | None:
        """Channels, or size of a token or vector; ``None`` where it is symbolic."""
        axis = 1 if self.rank == 4 else -1
        size = self.shape[axis]
        return size if isinstance(size, int) else None


def mask_of(cut: CutTensor, head: Head) -> str | None:
    """The mask that a head reads beside its cut tensor, if it does."""
    return cut.mask if cut.rank == 3 and head.kind in ("mean", "mean_max", "attention") else None


def family_of(cut: CutTensor) -> tuple[Head, ...]:
    """Give the heads to try; none where the tensor's shape has no known kind of head."""
    if cut.width is None:
        return ()
    if cut.rank == 4:
        return tuple(_map_heads(cut))
    if cut.rank == 3:
        return tuple(_token_heads())
    if cut.rank == 2:
        return (Head(kind="vector"), Head(kind="vector", hidden=HIDDEN))
    return ()


def _map_heads(cut: CutTensor) -> Sequence[Head]:
    coarsest, finest = grids_of(cut)[0], grids_of(cut)[-1]
    cheap = [] if coarsest == finest else [Head(kind="grid", grid=coarsest)]
    return [
        *cheap,
        Head(kind="grid", grid=finest),
        Head(kind="grid", grid=finest, hidden=HIDDEN),
    ]


def _token_heads() -> Sequence[Head]:
    # Joined with first token and maximum, the mean was no better; and the maximum of projected
    # tokens is not that of the tokens.
    fixed = [Head(kind="first"), Head(kind="mean")]
    learned = [Head(kind="attention", queries=queries) for queries in QUERIES]
    return [*fixed, *learned, Head(kind="attention", queries=QUERIES[0], hidden=HIDDEN)]


def grids_of(cut: CutTensor) -> tuple[int, ...]:
    """Grids to pool a map to: all of it, and the finest of 2, 4 and its own seventh or eighth part.

    Those between were chosen only at the very end of a model, where they net the same.
    """
    height, width = cut.shape[2], cut.shape[3]
    assert cut.width is not None
    if not isinstance(height, int) or not isinstance(width, int):
        return (1,)
    side = min(height, width)
    finest = 7 if side % 7 == 0 else 8
    fitting = [g for g in (1, 2, 4, finest) if g <= side and cut.width * g * g <= MAX_FEATURES]
    return (1, fitting[-1]) if len(fitting) > 1 else (1,)


def pooling_window(size: int, grid: int) -> tuple[int, int]:
    """Kernel and stride that pool ``size`` to exactly ``grid`` values, covering all.

    Windows tile where ``grid`` divides ``size``, and overlap elsewhere: a little for coarse grids,
    much where ``size`` is just below a multiple of a fine one (15 to 8: windows of 8).
    """
    stride = size // grid
    return size - (grid - 1) * stride, stride
