"""SubnetNorm: separate statistics for each subnet (SuperServe, sections 3 and 3.1).

A supernet's layers share their weights, but the statistics for normalising fit only the subnet that
they were collected on: with those of the full model the paper measured accuracies as low as 10 %.
SubnetNorm keeps means and variances for each subnet and layer, collected by forward passes.

In a graph for inference batch norms are folded into the convolutions before them, and mean and
variance are lost. They are not needed. Let a convolution compute z, followed in training by ``gamma
· (z − mean) / std + beta``, folded to y with the full model's mean and std. Over the samples, y of
the full model has the mean m = beta and the deviation s = abs(gamma), per channel. A subnet
computes other values y' with mean m' and deviation s', because z differs. Its own batch norm would
normalise z to gamma and beta again, and so return a tensor with mean m and deviation s; as y' is
linear in z, with a slope of gamma's sign, that is ``(y' − m') · s / s' + m``. So a scale and a
shift after the convolution, with m and s measured on the full model, are exactly what a batch norm
with the subnet's statistics and shared gamma and beta computes, except for the epsilon under its
root, and the difference between the samples and the training data.

If a batch norm still exists, its mean and variance are replaced by the subnet's.

Statistics of a layer depend on those before it. As in ``set_running_statistics`` of Once-for-all
(Cai et al. 2020), one pass over large batches normalises every layer by the batch's own moments and
records these. That is exact if all samples are in one batch, as for small models. Otherwise the
measured error of scales was 2e-4 with batches of 256 (1.5e-3 with batches of 16), far less than the
effect of choosing other samples. Each further pass with the recorded moments would make one more
layer exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx

from offramp.calibration.data.dataset import Dataset
from offramp.compiler.graphs.graph import Dataflow
from offramp.supernet.graphs.depth import DepthBlock
from offramp.supernet.graphs.elastic_model import Supernet
from offramp.supernet.graphs.moments import Moments, measure, rows_at_once
from offramp.supernet.graphs.norm_graph import Correction, correct, normalise_by_batch
from offramp.supernet.graphs.norm_layers import NormLayer, find_layers
from offramp.supernet.graphs.slicing_plan import SlicePlan

_LEAST_DEVIATION: Final = 1e-4
"""Smallest deviation of a channel, as a share of its deviation in the full model. This limits how
much channels that hardly vary are amplified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubnetNorm:
    """The normalising layers of a supernet, and their moments in the full model on the samples."""

    layers: tuple[NormLayer, ...]
    full: Mapping[str, Moments]
    """Moments of the full model, by layer; batch norms that are not folded are omitted."""
    samples: Dataset
    threads: int = 1

    @classmethod
    def of(cls, supernet: Supernet, samples: Dataset, *, threads: int = 1) -> SubnetNorm:
        """Find the layers, and measure the full model once for all subnets.

        ElasticSpecError if ``norm.layers`` names none, DataError if the model fails on a sample.
        """
        proto = supernet.model.proto
        layers = find_layers(supernet)
        folded = [layer for layer in layers if layer.folded]
        full = measure(proto, folded, samples, threads=threads)
        return cls(layers=layers, full=full, samples=samples, threads=threads)

    def apply(self, proto: onnx.ModelProto, plan: SlicePlan, skipped: Sequence[DepthBlock]) -> None:
        """Set a subnet's own statistics in its layers, in place.

        Layers whose inputs have the supernet's values are unchanged.
        """
        changed = _changed(proto, plan, skipped)
        layers = [layer for layer in self.layers if layer.tensor in changed]
        if not layers:
            return
        targets = {layer.node: self._target(layer, plan) for layer in layers if layer.folded}
        rows = rows_at_once(proto, layers, len(self.samples))
        by_batch = normalise_by_batch(proto, layers, targets)
        found = measure(
            by_batch, layers, self.samples, threads=self.threads, rows=rows, prepared=True
        )
        made = correct(proto, layers, targets, found)
        proto.CopyFrom(made)

    def _target(self, layer: NormLayer, plan: SlicePlan) -> Correction:
        """Return the target moments of a folded layer's channels: the moments in the full model."""
        moments, elastic = self.full[layer.node], plan.elastic.get(layer.tensor)
        kept = slice(None) if elastic is None else list(elastic.kept)
        deviation = np.sqrt(moments.variance[kept])
        least = (_LEAST_DEVIATION * deviation) ** 2
        return Correction(mean=moments.mean[kept], deviation=deviation, epsilon=least)


def _changed(
    proto: onnx.ModelProto, plan: SlicePlan, skipped: Sequence[DepthBlock]
) -> frozenset[str]:
    """Return the tensors whose values, not only channels, differ from the supernet's."""
    starts = {block.start for block in skipped}
    changed = set(starts)
    for op in Dataflow(proto.graph).operators:
        if op.name in plan.contracting or not changed.isdisjoint(op.reads):
            changed.update(op.writes)
    return frozenset(changed)
