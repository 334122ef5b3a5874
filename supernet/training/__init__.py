"""Train a supernet in torch: one set of weights with many subnets (OFA, DynaBERT).

An ordinary module becomes elastic by naming its parts: the blocks that may be skipped (elastic
depth) and the layers that may compute a prefix of their output channels (elastic width)::

    space = ElasticSpace(
        depth=(ElasticDepth(skip=("blocks.2", "blocks.1")),),
        width=(ElasticWidth(layers=("blocks.0.conv1", "blocks.1.conv1"), ratios=(0.25, 0.5)),),
    )
    supernet = ElasticModule(network, space)
    sandwich_step(supernet, (images,), labels, optimiser, generator)  # … for every batch
    supernet.record_norms(calibrate_norms(supernet, space.largest(), batches))

Layers after an elastic width adapt to their number of input channels, so only the layers that
compute fewer channels are named. Widths must be *inner* ones (the first convolution of a residual
block, the hidden units of an MLP, the heads of an attention): the tensors that a shortcut adds keep
their size.

:func:`export_supernet` writes the largest subnet as ONNX, and the specification of the others.

Sources: Cai et al. 2020 (Once-for-All, prefix slices), Yu & Huang 2019 (sandwich rule, in-place
distillation), Hou et al. 2020 (DynaBERT), Khare et al. 2025 (SuperServe 3: LayerSelect,
WeightSlice, SubnetNorm).
"""

from offramp.supernet.training.elastic_layers import (
    ElasticBatchNorm2d,
    ElasticConv2d,
    ElasticLinear,
)
from offramp.supernet.training.sandwich_rule import SandwichLosses, sandwich_step, soft_targets
from offramp.supernet.training.space import ElasticChoice, ElasticDepth, ElasticSpace, ElasticWidth
from offramp.supernet.training.supernet import (
    ElasticModule,
    NormStatistics,
    calibrate_norms,
    extract,
)
from offramp.supernet.training.supernet_export import SPECIFICATION, export_supernet

__all__ = [
    "SPECIFICATION",
    "ElasticBatchNorm2d",
    "ElasticChoice",
    "ElasticConv2d",
    "ElasticDepth",
    "ElasticLinear",
    "ElasticModule",
    "ElasticSpace",
    "ElasticWidth",
    "NormStatistics",
    "SandwichLosses",
    "calibrate_norms",
    "export_supernet",
    "extract",
    "sandwich_step",
    "soft_targets",
]
