"""Layers that compute a prefix of their channels, and blocks that can be skipped.

Elastic layers share the parameters of the ordinary layers from which they are made. Widths are
prefixes, as in Once-for-All (Cai et al. 2020) and SuperServe 3 (WeightSlice, LayerSelect): channels
of a smaller subnet are the first ones of a larger one.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn import functional

_Layer = TypeVar("_Layer", bound=nn.Module)


class ElasticConv2d(nn.Conv2d):
    """A convolution that computes a prefix of its outputs from a prefix of its inputs.

    A depthwise convolution computes as many channels as its input has; other numbers of groups are
    not supported.
    """

    active: int
    """Number of output channels computed now."""

    @classmethod
    def of(cls, layer: nn.Conv2d) -> ElasticConv2d:
        """Return an elastic convolution that shares the parameters of another, without a copy."""
        made = _same_state(cls, layer)
        made.active = layer.out_channels
        return made

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, active, height, width] from [batch, channels, height, width]."""
        inputs = x.shape[1]
        outputs, groups = (inputs, inputs) if self.groups > 1 else (self.active, 1)
        weight, bias = self.weight, self.bias
        if (outputs, inputs) != (self.out_channels, self.in_channels):
            weight, bias = weight[:outputs, : inputs // groups], _prefix(bias, outputs)
        return functional.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, groups)


class ElasticLinear(nn.Linear):
    """A linear layer that computes a prefix of its outputs from a prefix of its inputs."""

    active: int
    """Number of output features computed now."""

    @classmethod
    def of(cls, layer: nn.Linear) -> ElasticLinear:
        """Return an elastic layer that shares the parameters of another, without a copy."""
        made = _same_state(cls, layer)
        made.active = layer.out_features
        return made

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., active] from [..., features]."""
        weight = self.weight[: self.active, : x.shape[-1]]
        return functional.linear(x, weight, _prefix(self.bias, self.active))


class ElasticBatchNorm2d(nn.BatchNorm2d):
    """A batch norm of as many channels as its input has.

    In training it normalises by the batch and does not update the running statistics: they would be
    a mixture of subnets that fits none (SuperServe 3, SubnetNorm). :func:`calibrate_norms` computes
    the statistics of one subnet.
    """

    @classmethod
    def of(cls, layer: nn.BatchNorm2d) -> ElasticBatchNorm2d:
        """Return an elastic norm that shares the parameters of another, without a copy."""
        return _same_state(cls, layer)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [batch, channels, height, width]."""
        mean, variance, weight, bias = (
            _prefix(vector, x.shape[1])
            for vector in (self.running_mean, self.running_var, self.weight, self.bias)
        )
        by_batch = self.training or mean is None
        if by_batch:
            mean, variance = None, None
        return functional.batch_norm(
            x, mean, variance, weight, bias, training=by_batch, eps=self.eps
        )


class ElasticBlock(nn.Module):
    """A block that returns its first argument while it is skipped (LayerSelect)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.skipped = False

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        """Return the block's output, which has the shape of ``x``."""
        if self.skipped:
            return x
        given: Tensor = self.block(x, *others, **named)
        if given.shape != x.shape:
            raise ValueError(
                f"a block that may be skipped changes {list(x.shape)} to {list(given.shape)}: "
                "name blocks that keep the shape"
            )
        return given


class PassThrough(nn.Module):
    """Replacement of a skipped block in a subnet."""

    def forward(self, x: Tensor, *_others: Any, **_named: Any) -> Tensor:
        """Return the first argument."""
        return x


def is_depthwise(layer: nn.Conv2d) -> bool:
    """Return whether each channel is convolved separately."""
    return layer.groups > 1 and layer.groups == layer.in_channels == layer.out_channels


def elastic(layer: nn.Module) -> nn.Module | None:
    """Return the elastic counterpart of a layer, with the layer's own parameters, or ``None``.

    Subclasses of layers have none, because their computation is unknown.
    """
    if type(layer) is nn.Conv2d:
        sliceable = layer.groups == 1 or is_depthwise(layer)
        return ElasticConv2d.of(layer) if sliceable and layer.padding_mode == "zeros" else None
    if type(layer) is nn.Linear:
        return ElasticLinear.of(layer)
    if type(layer) is nn.BatchNorm2d:
        return ElasticBatchNorm2d.of(layer)
    return None


def plain(layer: nn.Module, inputs: int) -> nn.Module:
    """Copy the current computation of an elastic layer into an ordinary one.

    Args:
        layer: An elastic layer.
        inputs: Number of its input channels.

    Raises:
        TypeError: The layer is not elastic.
    """
    made: nn.Module
    if isinstance(layer, ElasticConv2d):
        depthwise = layer.groups > 1
        made = nn.Conv2d(
            inputs,
            inputs if depthwise else layer.active,
            layer.kernel_size,  # type: ignore[arg-type]  # always tuples of two
            layer.stride,  # type: ignore[arg-type]
            layer.padding,  # type: ignore[arg-type]
            layer.dilation,  # type: ignore[arg-type]
            inputs if depthwise else 1,
            layer.bias is not None,
        )
    elif isinstance(layer, ElasticLinear):
        made = nn.Linear(inputs, layer.active, layer.bias is not None)
    elif isinstance(layer, ElasticBatchNorm2d):
        tracks = layer.running_mean is not None
        made = nn.BatchNorm2d(
            inputs, layer.eps, layer.momentum, affine=layer.affine, track_running_stats=tracks
        )
    else:
        raise TypeError(f"{type(layer).__name__} is not elastic: use a layer of this module")
    for parameter in layer.parameters():
        made.to(parameter.device, parameter.dtype)
    theirs = layer.state_dict()
    for name, tensor in made.state_dict(keep_vars=True).items():
        prefix = theirs[name][tuple(slice(size) for size in tensor.shape)]
        tensor.data.copy_(prefix)
    return made.train(layer.training)


def _prefix(vector: Tensor | None, size: int) -> Tensor | None:
    return None if vector is None else vector[:size]


def _same_state(cls: type[_Layer], layer: nn.Module) -> _Layer:
    made = cls.__new__(cls)
    made.__dict__.update(layer.__dict__)
    return made
