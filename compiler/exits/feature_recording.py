"""Recording of features: their size on the disk, and the passes over the data that are needed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offramp.calibration.data.augmentation import AugmentedSamples, Method, makes_sense, method_for
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.data.scratch import describe_bytes
from offramp.calibration.heads.feature_plan import GIB, FeaturePlan, SampleCounts, plan_features
from offramp.calibration.heads.features import (
    Projections,
    Recording,
    fit_projections,
    projected_samples,
    record,
    sample_sizes,
)
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.common.progress import Progress
from offramp.compiler.common.resources import check_space
from offramp.compiler.cuts.slicing import Sliced
from offramp.compiler.exits.heads import attach_poolings
from offramp.compiler.exits.timed_model import CompileRun
from offramp.engine.common.environment import available_cores

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureRecorder:
    """Records the features that heads train on, in one or more passes over the data."""

    sliced: Sliced
    graph: bytes
    """Graph of the model's segments and the heads' poolings."""
    outputs: tuple[Mapping[int, str], ...]
    """Names of the graph's outputs: for each candidate, by size of the pooling grid."""
    train: Dataset
    tune: Dataset
    made: AugmentedSamples | None
    plan: FeaturePlan
    progress: Progress

    @classmethod
    def of(cls, sliced: Sliced, run: CompileRun) -> FeatureRecorder:
        """Plan passes within the disk limit; DataError if too few samples would fit."""
        parts, options = run.parts, run.options
        graph, outputs = attach_poolings(sliced.model, sliced.graphs, sliced.cuts)
        sizes = sample_sizes(graph, outputs, sliced.cuts, parts.train, threads=available_cores())
        method = augmentation(sliced, parts.train, options)
        made = (
            None
            if method is None
            else AugmentedSamples.draw(parts.train, method, seed=options.seed)
        )
        counts = SampleCounts(
            train=len(parts.train), made=0 if made is None else len(made), tune=len(parts.tune)
        )
        plan = plan_features(sizes, counts, round(options.scratch_limit * GIB))
        train = parts.train
        if plan.counts != counts:
            _warn(plan, counts, options.scratch_limit)
            if plan.counts.train < counts.train:
                train = train.subset(_spread(counts.train, plan.counts.train))
            if made is not None:
                kept = _spread(counts.made, plan.counts.made)
                made = made.subset(kept) if len(kept) else None
        return cls(
            sliced=sliced,
            graph=graph,
            outputs=outputs,
            train=train,
            tune=parts.tune,
            made=made,
            plan=plan,
            progress=run.progress,
        )

    @property
    def masks(self) -> frozenset[str]:
        """Graph inputs that heads may read in addition to cut tensors."""
        return frozenset(cut.mask for cut in self.sliced.cuts if cut.mask)

    @property
    def size_bytes(self) -> int:
        """Size in bytes of the largest pass on the disk: features and masks."""
        first = self.train.take(slice(1))
        return self.plan.size_bytes + self.plan.counts.total * sum(
            first[name].nbytes for name in self.masks
        )

    def check(self, directory: Path) -> None:
        """Raise DataError if a pass does not fit into a folder."""
        check_space(directory.parent, self.size_bytes)

    def fit(self) -> Projections:
        """Compute the principal components of tokens, for all candidates in one run."""
        samples = projected_samples(self.outputs, self.sliced.cuts, len(self.train))
        if not samples:
            return {}
        with self.progress.step("Find components of tokens", samples) as advance:
            return fit_projections(
                self.graph,
                self.outputs,
                self.sliced.cuts,
                self.train,
                threads=available_cores(),
                progress=advance,
            )

    def record(
        self, number: int, directory: Path, projections: Projections
    ) -> tuple[Recording, Recording]:
        """Record one pass for the training samples, and for the tuning samples."""
        group, passes = self.plan.groups[number], len(self.plan.groups)
        outputs = tuple(names if i in group else {} for i, names in enumerate(self.outputs))
        title = "Record features" + (f" ({number + 1} of {passes})" if passes > 1 else "")
        directory.mkdir()
        with self.progress.step(title, self.plan.counts.total) as advance:
            train, tune = (
                record(
                    self.graph,
                    outputs,
                    self.sliced.model.taught,
                    part,
                    made=more,
                    projections={c: p for c, p in projections.items() if c in group},
                    masks=self.masks,
                    threads=available_cores(),
                    directory=directory / name,
                    progress=advance,
                )
                for name, part, more in (
                    ("train", self.train, self.made),
                    ("tune", self.tune, None),
                )
            )
        return train, tune


def augmentation(sliced: Sliced, train: Dataset, options: CompileOptions) -> Method | None:
    """Return the method that generates training samples (``--augment``), if one is used."""
    method = method_for(sliced.model.inputs) if options.building.augment == "auto" else None
    return method if method is not None and makes_sense(method, train) else None


def _spread(samples: int, kept: int) -> NDArray[np.intp]:
    """Return evenly spaced rows, because a data set may be sorted."""
    return np.linspace(0, samples - 1, kept).round().astype(np.intp)


def _warn(plan: FeaturePlan, all_: SampleCounts, limit_gib: float) -> None:
    needed = plan.size_bytes // plan.counts.total * all_.total
    _log.warning(
        "Heads train on %s of %s real samples and %s of %s generated ones: features of all would "
        "take %s at a time in %d passes, more than the %g GiB of --scratch-limit; raise it to "
        "train on all.",
        f"{plan.counts.train:,}",
        f"{all_.train:,}",
        f"{plan.counts.made:,}",
        f"{all_.made:,}",
        describe_bytes(needed),
        len(plan.groups),
        limit_gib,
    )
