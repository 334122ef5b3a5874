"""A module with its subnets: choice of a subnet, its copy, and statistics of its batch norms."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offramp.supernet.training.elastic_layers import (
    ElasticBatchNorm2d,
    ElasticBlock,
    ElasticConv2d,
    ElasticLinear,
    PassThrough,
    elastic,
    plain,
)
from offramp.supernet.training.space import ElasticChoice, ElasticSpace


class NormStatistics(NamedTuple):
    """Statistics by which one batch norm normalises in one subnet."""

    mean: Tensor
    """Mean of each channel, float32 [channels]."""
    variance: Tensor
    """float32 [channels]; the divisor is the number of values (population variance)."""


class ElasticModule(nn.Module):
    """A module with its subnets; it computes the chosen subnet, at first the largest."""

    def __init__(self, module: nn.Module, space: ElasticSpace, sample: Sequence[Tensor]) -> None:
        """Make a module elastic, in place; it keeps its own parameters.

        Args:
            module: The largest subnet, of ordinary layers.
            space: Blocks that may be skipped, and elastic layers.
            sample: Arguments of one forward pass, to find the input sizes of layers.

        Raises:
            ValueError: The module does not have these parts, or the smallest subnet cannot be
            computed.
        """
        super().__init__()
        self.module, self.space, self.sample = module, space, tuple(sample)
        self.training = module.training
        self._elastic: dict[str, ElasticConv2d | ElasticLinear] = {}
        self._norms: dict[str, ElasticBatchNorm2d] = {}
        self._blocks: dict[str, ElasticBlock] = {}
        self._convert()
        for width in space.width:
            for name in width.layers:
                self._check_width(name, width.ratios)
        # Inner blocks first, because wrapping a block changes the names inside it.
        skippable = [name for group in space.depth for name in group.skip]
        for name in sorted(skippable, key=lambda name: -name.count(".")):
            self._blocks[name] = ElasticBlock(_part(module, name))
            module.set_submodule(name, self._blocks[name])
        self._check_runs()

    def forward(self, *inputs: Any) -> Any:
        """Compute the chosen subnet; arguments and answer are those of the module."""
        return self.module(*inputs)

    def choose(self, choice: ElasticChoice) -> None:
        """Compute this subnet from now on; takes microseconds and copies nothing."""
        skipped = self.space.skipped_blocks(choice)
        for name, block in self._blocks.items():
            block.skipped = name in skipped
        for name, ratio in self.space.ratio_by_layer(choice).items():
            layer = self._elastic[name]
            layer.active = round(ratio * layer.weight.shape[0])

    def record_norms(self, norms: Mapping[str, NormStatistics]) -> None:
        """Set the running statistics of the batch norms to those of the largest subnet."""
        for name, found in norms.items():
            _record(self._norms[name], found)

    def _convert(self) -> None:
        made: dict[nn.Module, nn.Module] = {}
        for name, layer in list(self.named_modules(remove_duplicate=False)):
            counterpart = made.get(layer) or elastic(layer)
            if counterpart is None:
                continue
            made[layer] = counterpart
            self.set_submodule(name, counterpart)
            own = name.removeprefix("module.")
            if isinstance(counterpart, ElasticBatchNorm2d):
                self._norms[own] = counterpart
            elif isinstance(counterpart, ElasticConv2d | ElasticLinear):
                self._elastic[own] = counterpart

    def _check_width(self, name: str, ratios: Sequence[float]) -> None:
        layer = self._elastic.get(name)
        if layer is None or (isinstance(layer, ElasticConv2d) and layer.groups > 1):
            kind = type(_part(self.module, name)).__name__
            raise ValueError(
                f"the width of {name} ({kind}) is not elastic: name a Conv2d without groups or a "
                f"Linear, such as {', '.join(list(self._elastic)[:3])}"
            )
        channels = layer.weight.shape[0]
        for ratio in ratios:
            if abs(channels * ratio - round(channels * ratio)) > 1e-6 or channels * ratio < 1:
                raise ValueError(
                    f"{ratio} of the {channels} channels of {name} is {channels * ratio:g}: "
                    "use ratios that keep a whole number of channels"
                )

    @torch.no_grad()
    def _check_runs(self) -> None:
        copied = copy.deepcopy(self).eval()
        try:
            largest = copied(*self.sample)
            copied.choose(self.space.smallest())
            smallest = copied(*self.sample)
        except (RuntimeError, IndexError) as error:
            raise ValueError(
                f"the smallest subnet cannot be computed ({error}): name only inner widths, whose "
                "readers are Conv2d, Linear or BatchNorm2d"
            ) from error
        if isinstance(largest, Tensor) and largest.shape != smallest.shape:
            raise ValueError(
                f"the smallest subnet answers {list(smallest.shape)} where the largest answers "
                f"{list(largest.shape)}: remove the last layer from the widths"
            )


def extract(
    supernet: ElasticModule,
    choice: ElasticChoice,
    norms: Mapping[str, NormStatistics] | None = None,
) -> nn.Module:
    """Copy a subnet to an ordinary module of prefix slices, without skipped blocks.

    Args:
        supernet: Supernet with the weights.
        choice: Subnet to copy.
        norms: Statistics of its batch norms by name, from :func:`calibrate_norms`; without them,
            the copy gets prefixes of the supernet's statistics, which fit only the largest subnet.

    Returns:
        A module in evaluation mode whose parts have the names of the original module's.
    """
    copied = copy.deepcopy(supernet).eval()
    copied.choose(choice)
    given: dict[nn.Module, int] = {}

    def note(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        given[layer] = arguments[0].shape[-1 if isinstance(layer, nn.Linear) else 1]

    layers = [*copied._elastic.values(), *copied._norms.values()]  # noqa: SLF001
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    with torch.no_grad():
        copied(*copied.sample)
    for handle in handles:
        handle.remove()
    for name, part in list(copied.named_modules(remove_duplicate=False)):
        if part in given:
            copied.set_submodule(name, plain(part, given[part]))
    wrapped = {
        name: part for name, part in copied.named_modules() if isinstance(part, ElasticBlock)
    }
    for name in sorted(wrapped, key=lambda name: -name.count(".")):
        part = wrapped[name]
        copied.set_submodule(name, PassThrough() if part.skipped else part.block)
    for name, found in (norms or {}).items():
        _record(copied.module.get_submodule(name), found)
    return copied.module


@torch.no_grad()
def calibrate_norms(
    supernet: ElasticModule, choice: ElasticChoice, batches: Iterable[Sequence[Tensor]]
) -> dict[str, NormStatistics]:
    """Compute the statistics of a subnet's batch norms by forward passes (SubnetNorm).

    Every batch is normalised by its own statistics, as in training. The resulting means and
    variances are over all values that reach a norm in all batches.

    Args:
        supernet: Supernet with the weights; it is not changed.
        choice: Subnet.
        batches: Arguments of forward passes; a few hundred samples suffice.

    Returns:
        Statistics by name of the norm in the original module; norms of skipped blocks have none.

    Raises:
        ValueError: There are no batches.
    """
    subnet = extract(supernet, choice)
    sums: dict[str, _Moments] = {}
    for name, norm in subnet.named_modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.train()
            norm.momentum = 0.0  # normalise by the batch, record nothing
            sums[name] = _Moments()
            norm.register_forward_pre_hook(sums[name].add)
    passes = 0
    for batch in batches:
        subnet(*batch)
        passes += 1
    if not passes:
        raise ValueError("no batches to calibrate norms on: pass one or more")
    return {name: moments.statistics() for name, moments in sums.items() if moments.count}


class _Moments:
    """Count, mean and squared deviations per channel, merged batch by batch (Chan 1979)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros((), dtype=torch.float64)
        self.squares = torch.zeros((), dtype=torch.float64)

    def add(self, _norm: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        values = arguments[0].double().transpose(0, 1).flatten(1)
        added, mean = values.shape[1], values.mean(1)
        apart, total = mean - self.mean, self.count + added
        self.squares = self.squares + (values - mean[:, None]).square().sum(1)
        self.squares = self.squares + apart.square() * (self.count * added / total)
        self.mean = self.mean + apart * (added / total)
        self.count = total

    def statistics(self) -> NormStatistics:
        return NormStatistics(self.mean.float(), (self.squares / self.count).float())


def _record(norm: nn.Module, found: NormStatistics) -> None:
    if not isinstance(norm, nn.BatchNorm2d) or norm.running_mean is None:
        raise ValueError(f"{type(norm).__name__} has no running statistics: name a BatchNorm2d")
    if norm.running_mean.shape != found.mean.shape:
        raise ValueError(
            f"statistics of {len(found.mean)} channels for a batch norm of "
            f"{len(norm.running_mean)}: use those of the same subnet"
        )
    assert norm.running_var is not None
    norm.running_mean.copy_(found.mean)
    norm.running_var.copy_(found.variance)


def _part(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError as error:
        names = [other for other, _ in module.named_modules() if other]
        near = difflib.get_close_matches(name, names, 3, 0.0)
        raise ValueError(f"the module has no part {name}; near it: {', '.join(near)}") from error
