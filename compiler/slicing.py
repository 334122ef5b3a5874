"""The model in pieces."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offramp.bundle import TensorSpec
from offramp.calibration.families import CutTensor
from offramp.compiler.cuts import CutAnalysis, CutPoint, find_cuts
from offramp.compiler.errors import ModelError, NoCutPointError, UnknownCutPointError
from offramp.compiler.model import SourceModel
from offramp.compiler.options import CompileOptions
from offramp.compiler.segments import SegmentModel, split


@dataclass(frozen=True, slots=True, kw_only=True)
class Sliced:
    """The model in pieces, as the later steps need them."""

    model: SourceModel
    cuts: tuple[CutTensor, ...]
    """What the exit after segment i would read; one less than there are segments."""
    segments: tuple[SegmentModel, ...]
    graphs: tuple[bytes, ...]
    """The segments, serialised."""


def slice_model(model: SourceModel, options: CompileOptions) -> Sliced:
    """Cut the model at its candidates.

    Raises:
        CompileError: There are no cut points, or the user named one or a mask that does not exist.
    """
    analysis = find_cuts(model)
    points = choose_candidates(analysis, limit=options.candidates, exits=options.exits or None)
    mask = find_mask(model.inputs, analysis.main_inputs, options.mask)
    cuts = tuple(_cut_tensor(point, mask) for point in points)
    if options.mask is not None and not any(cut.mask for cut in cuts):
        shapes = "; ".join(f"{cut.name}: [{', '.join(map(str, cut.shape))}]" for cut in cuts)
        raise ModelError(
            f"--mask {options.mask!r} fits no exit: none reads [batch, tokens, width] with as "
            f"many tokens as the mask; they read {shapes}"
        )
    segments = split(model, points)
    return Sliced(
        model=model,
        cuts=cuts,
        segments=segments,
        graphs=tuple(s.proto.SerializeToString() for s in segments),
    )


def _cut_tensor(point: CutPoint, mask: Mask | None) -> CutTensor:
    cut = CutTensor(name=point.tensor, dtype=point.dtype, shape=point.shape)
    if mask is None or cut.rank != 3 or cut.shape[1] != mask.tokens:
        return cut
    return replace(cut, mask=mask.name, mask_dtype=mask.dtype)


DEFAULT_LIMIT = 12
"""Exits to build at most; PAME 5.2 finds eleven blocks to be enough."""
_SHOWN = 5
_DENSITY = 1.5
"""Exponent of the marks; 1 spaces candidates evenly."""


def choose_candidates(
    analysis: CutAnalysis, *, limit: int = DEFAULT_LIMIT, exits: Sequence[str | int] | None = None
) -> tuple[CutPoint, ...]:
    """Choose the cut points to build exits at, in the order of the data flow, at least one.

    Args:
        analysis: The model's cut points.
        limit: At most so many are kept, spread over the cost (PAME 5.2).
        exits: The user's own list, of tensor names or indices; it wins over ``limit``.

    Raises:
        NoCutPointError: The model has no cut point.
        UnknownCutPointError: ``exits`` names something that is no cut point.
        ValueError: ``limit`` is not positive, or ``exits`` is empty.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit}, expected at least 1")
    if not analysis.cuts:
        raise NoCutPointError(_why_none(analysis))
    if exits is not None:
        if not exits:
            raise ValueError("exits is empty, expected at least one cut point")
        wanted = {_find(analysis, item).index for item in exits}
        return tuple(cut for cut in analysis.cuts if cut.index in wanted)
    return _thinned(analysis.cuts, limit)


def _thinned(cuts: Sequence[CutPoint], limit: int) -> tuple[CutPoint, ...]:
    """Keep the cut points nearest to some shares of the cost, denser towards the start, none twice.

    The marks are (i/(limit+1))^1.5: neither a mark at the start nor one at the end saves anything.
    PAME spaces them evenly; but most samples leave at the first exits, and what those leave
    behind is where time is saved: on the Fashion-MNIST example a first exit at 4 % of the model
    instead of 8 % still answers 61 % of the samples.
    """
    if len(cuts) <= limit:
        return tuple(cuts)
    chosen: list[CutPoint] = []
    start = 0
    for i in range(limit):
        mark = ((i + 1) / (limit + 1)) ** _DENSITY
        reserve = limit - i - 1
        window = cuts[start : len(cuts) - reserve]
        best = min(window, key=lambda cut: abs(cut.flops_share_before - mark))
        start = best.index + 1
        chosen.append(best)
    return tuple(chosen)


def _find(analysis: CutAnalysis, item: str | int) -> CutPoint:
    """Look up one entry of the user's list; digits are an index, unless they are a name."""
    names = [cut.tensor for cut in analysis.cuts]
    if item in names:
        return analysis.cuts[names.index(str(item))]
    if str(item).isdecimal() and int(item) < len(names):
        return analysis.cuts[int(item)]
    near = difflib.get_close_matches(str(item), names, n=_SHOWN, cutoff=0.0)
    places = {cut.tensor: cut.index for cut in analysis.cuts}
    raise UnknownCutPointError(
        f"no cut point {item!r}; indices run from 0 to {len(names) - 1}, the nearest names are "
        + ", ".join(f"{name!r} ({places[name]})" for name in near)
        + _rejected_as(analysis, item)
    )


def _rejected_as(analysis: CutAnalysis, item: str | int) -> str:
    reasons = [r.reason for r in analysis.rejected if r.tensor == item]
    return f"; {item!r} was rejected: {reasons[0]}" if reasons else ""


def _why_none(analysis: CutAnalysis) -> str:
    reasons = [f"`{r.tensor}` ({r.operator}): {r.reason}" for r in analysis.rejected[:_SHOWN]]
    return (
        "the model has no cut point, a place where one tensor carries everything onward, with "
        "work before and after it. " + ("Rejected: " + "; ".join(reasons) if reasons else "")
    ).strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """A graph input [batch, tokens], 1 where a token counts and 0 where it pads."""

    name: str
    dtype: str
    tokens: int | str
    """Size of the second dimension, maybe symbolic."""


def find_mask(
    inputs: Sequence[TensorSpec], main_inputs: Sequence[str], named: str | None
) -> Mask | None:
    """Find the mask: the one that the user named, or the one side input called a mask.

    Raises:
        ModelError: The input named is not there, or is not [batch, tokens].
    """
    shaped = {spec.name: spec for spec in inputs if len(spec.shape) == 2}
    if named is not None:
        if named not in shaped:
            known = "; ".join(spec.describe() for spec in inputs)
            raise ModelError(
                f"--mask {named!r} is not an input of shape [batch, tokens]; inputs are {known}"
            )
        return _mask(shaped[named])
    found = [s for n, s in shaped.items() if "mask" in n.lower() and n not in main_inputs]
    return _mask(found[0]) if len(found) == 1 else None


def _mask(spec: TensorSpec) -> Mask:
    return Mask(name=spec.name, dtype=spec.dtype, tokens=spec.shape[1])
