"""What a user can ask of the compiler."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from offramp.calibration.training import TrainingOptions

Selection: TypeAlias = Literal["savings", "pame"]
"""How the exits in use are chosen among those that were built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """One run of ``eecompile``."""

    model: Path
    data: Path
    output: Path
    overwrite: bool = False
    answer: str | None = None
    """The output that exits imitate, where the model has several."""
    mask: str | None = None
    """The graph input that says which tokens count; found by name where not given."""
    exits: tuple[str, ...] = ()
    """Cut points to build exits at, by index or tensor name; empty chooses ``candidates``."""
    candidates: int = 12
    """Most exits that are built."""
    max_disagreement: float = 0.01
    confidence: float = 0.95
    max_overhead: float | None = None
    """Share of the source model's time that the exits may add for a sample that takes none
    (Apparate's ramp budget), at the reference batch size, where the measurement is sure of it.
    ``None`` is no limit: what exits add is a price in the savings. With ``savings`` only."""
    selection: Selection = "savings"
    """``savings``: what is expected to save most time. ``pame``: what a rehearsal on
    batches of the tuning split finds, which keeps batches from becoming late."""
    rehearsal_batch: int = 32
    """Rows of a rehearsed batch. With ``pame`` only."""
    max_violations: float = 0.02
    """Largest share of batches that an exit may make late. With ``pame`` only."""
    tolerance: float = 1e-5
    """Largest relative difference between chained segments and source."""
    reference_batch_size: int = 8
    """Savings are predicted with the times profiled at this batch size."""
    threads: int = 1
    """Of ONNX Runtime while profiling."""
    simplify: bool = True
    augment: Literal["auto", "off"] = "auto"
    """``auto``: heads train on made samples too, where a way to make them fits the inputs
    (:mod:`offramp.calibration.augmentation`)."""
    training: TrainingOptions = field(default_factory=TrainingOptions)
    seed: int = 0
