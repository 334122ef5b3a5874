"""The graph that features are recorded with: the model, and a pooling at every candidate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offramp.calibration.families import CutTensor, family_of, grids_of
from offramp.calibration.features import WHOLE
from offramp.compiler.heads import build_pooling
from offramp.compiler.model import SourceModel
from offramp.engine.assembly import assemble


def attach_poolings(
    model: SourceModel, segments: Sequence[bytes], cuts: Sequence[CutTensor]
) -> tuple[bytes, tuple[Mapping[int, str], ...]]:
    """Join segments and poolings into one graph.

    Returns:
        The model, whose first output is the answer, and per candidate the names of its outputs
        by grid (``WHOLE`` for tensors that are recorded as they are; none where no head fits).
    """
    parts: list[bytes] = []
    outputs: list[Mapping[int, str]] = []
    for index, (segment, cut) in enumerate(zip(segments, cuts, strict=False)):
        parts.append(segment)
        if cut.rank != 4 or not family_of(cut):
            outputs.append({WHOLE: cut.name} if family_of(cut) else {})
            continue
        prefix = f"offramp_pool_{index:02d}/"
        pooling, names = build_pooling(
            cut, prefix, grids_of(cut), opset=model.opset, ir_version=model.proto.ir_version
        )
        parts.append(pooling)
        outputs.append(names)
    parts.extend(segments[len(cuts) :])
    wanted = [model.answer.output, *(name for e in outputs for name in e.values())]
    return assemble(parts, wanted), tuple(outputs)
