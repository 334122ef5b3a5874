"""What runs the streams of an engine where that is not its own process, as the engine knows it."""

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
    """How a model is split among streams that differ, as its deployments need to know it."""

    @property
    def borders(self) -> frozenset[int]:
        """The segments behind which stages have to end."""
        ...

    @property
    def exits(self) -> frozenset[int]:
        """The exits that earn something where the model is split like this: others are off."""
        ...

    def batch_size(self, most: int) -> int:
        """Return the rows of a batch; ``most`` at most."""
        ...

    def placement(self, stages: Plan, max_batch_size: int, overhead_s: float) -> Placement:
        """Place the stages of a policy; a ValueError if the splits do not end where stages do.

        ``overhead_s`` is what each stage costs beyond its graph.
        """
        ...


class StreamDevices(Protocol):
    """Devices that each run one stream: worker processes, for instance."""

    @property
    def count(self) -> int:
        """How many there are, and so how many streams."""
        ...

    @property
    def local(self) -> int:
        """How many of them use the cores of this host at a time."""
        ...

    @property
    def elsewhere(self) -> bool:
        """Whether some do not have the files of this host."""
        ...

    def check(self, options: EngineOptions) -> None:
        """Refuse, by a ValueError, options that do not go with these devices."""
        ...

    def open(
        self, local: Backend, bundles: Sequence[Path], options: EngineOptions, *, max_rows: int
    ) -> StreamBackend:
        """Open the devices, to run stages of ``bundles`` by backends like ``local``.

        No batch has more than ``max_rows``. ``local`` is taken over: closed with the devices, and
        closed if these cannot be opened.

        Raises:
            BackendError: They cannot run, or cannot be reached.
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
        """Split a model among the devices, and say which of them holds what.

        ``None`` has each hold all of it. ``refused`` is what devices could not load of the ways in
        which it was split before.

        Raises:
            OptionsError: It cannot be split as it is asked.
        """
        ...
