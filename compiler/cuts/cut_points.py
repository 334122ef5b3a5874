"""What the search for cut points gives: those found, and why there are none elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from offramp.calibration.heads.cut_tensors import CutTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPoint:
    """A tensor, or a few, through which everything passes that the rest of the model needs."""

    index: int
    """Position among the cut points of the model, from 0."""
    tensor: str
    """Its name; where there are several, that of the one that is written last."""
    dtype: str
    """numpy's name of the element type."""
    shape: tuple[int | str, ...]
    """Sizes; the first one is the batch."""
    operator: str
    """ONNX type of the operator that writes the tensor."""
    flops_share_before: float
    """Share of the model's FLOPs spent up to here, 0 to 1."""
    side_inputs: tuple[str, ...]
    """Graph inputs that later segments need beside the tensor, in the model's order."""
    channels: int | None = None
    """The dimension that holds the channels, where the operators around the tensor tell."""
    beside: tuple[CutTensor, ...] = ()
    """The others, where there are several."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all its tensors."""
        return (self.tensor, *(other.name for other in self.beside))

    def as_heads_see_it(self) -> CutTensor:
        """Describe the tensors to what builds heads."""
        return CutTensor(
            name=self.tensor,
            dtype=self.dtype,
            shape=self.shape,
            channels=self.channels,
            beside=self.beside,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A place, or several alike, where no exit can be attached."""

    tensor: str
    """The tensor of the place, or the first of several."""
    operator: str
    """ONNX type of the operator that writes it."""
    places: int
    """How many tensors this stands for."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CutAnalysis:
    """All cut points of a model in the order of its data flow, and what was rejected."""

    cuts: tuple[CutPoint, ...]
    rejected: tuple[Rejection, ...]
    main_inputs: tuple[str, ...]
    """Graph inputs whose data flow through the cut tensors."""
    total_flops: float
    """Of one sample, a multiply-add counting as two; 0 where that is not known."""
    unknown_work: tuple[str, ...] = ()
    """Types of operators whose FLOPs are not known. Shares are of time then, which was measured."""
    total_s: float | None = None
    """Time of one run of all operators, alone, where that is what shares are of."""
    end: CutPoint | None = None
    """The first place of one tensor behind which too little work is left for an exit: what follows
    is the model's own head."""
    rereads: bool = False
    """Whether main inputs are read again after cut tensors, and hence taken along."""
