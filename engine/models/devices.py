"""Protocols of the devices that run an engine's streams outside of its process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from offramp.bundle import Bundle
from offramp.engine.common.errors import StageNotLoadedError
from offramp.engine.scheduling import Placement
from offramp.engine.stages.backend_protocol import Backend, StreamBackend
from offramp.engine.stages.plan import Plan

if TYPE_CHECKING:
    from offramp.engine.models.options import EngineOptions


class ModelSplits(Protocol):
    """The split of a model among streams that differ; its deployments use the split."""

    @property
    def borders(self) -> frozenset[int]:
        """Segments after which stages must end."""
        ...

    @property
    def exits(self) -> frozenset[int]:
        """Exits that save time with this split; others are off."""
        ...

    def batch_size(self, most: int) -> int:
        """Return the number of rows in a batch, at most ``most``."""
        ...

    def placement(self, stages: Plan, max_batch_size: int, overhead_s: float) -> Placement:
        """Place the stages of a policy; ValueError if a split ends inside a stage.

        ``overhead_s`` is the time of each stage in addition to its graph.
        """
        ...


class StreamDevices(Protocol):
    """Devices that each run one stream, for example worker processes."""

    @property
    def count(self) -> int:
        """Number of devices, and so of streams."""
        ...

    @property
    def local(self) -> int:
        """Number of devices that use the cores of this host at the same time."""
        ...

    @property
    def elsewhere(self) -> bool:
        """True if some devices cannot read the files of this host."""
        ...

    def check(self, options: EngineOptions) -> None:
        """Raise ValueError for options that these devices do not support."""
        ...

    def open(
        self, local: Backend, bundles: Sequence[Path], options: EngineOptions, *, max_rows: int
    ) -> StreamBackend:
        """Open the devices, to run stages of ``bundles`` with backends like ``local``.

        No batch has more than ``max_rows`` rows. The devices own ``local``: it is closed when they
        are closed, and also if they cannot be opened.

        Raises:
            BackendError: The devices cannot run, or cannot be reached.
        """
        ...

    def split(
        self,
        name: str,
        bundle: Bundle,
        backend: Backend,
        options: EngineOptions,
        refused: Sequence[StageNotLoadedError] = (),
    ) -> ModelSplits | None:
        """Split a model among the devices, and decide which of them holds which part.

        ``None`` means that each holds the whole model. ``refused`` are stages of earlier splits
        that devices could not load.

        Raises:
            OptionsError: The model cannot be split as requested.
        """
        ...
