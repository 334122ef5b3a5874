"""The model in pieces."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offramp.calibration.families import CutTensor
from offramp.compiler.candidates import choose_candidates
from offramp.compiler.cuts import CutPoint, find_cuts
from offramp.compiler.errors import ModelError
from offramp.compiler.masks import Mask, find_mask
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
