"""The methods of the protocol, shared by gRPC and HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from offramp.server.common.served import ServedEngine
from offramp.server.repository.repository import ModelRepository
from offramp.server.requests.admission import RequestAdmission
from offramp.server.requests.answering import RequestAnswering
from offramp.server.requests.decoding import RequestDecoder
from offramp.server.requests.shared_memory import SharedRegions
from offramp.server.services.management import ManagementService, OptionsReader
from offramp.server.services.service import InferenceService


class ProtocolServices:
    """The services of an engine and their shared state; used on the event loop's thread."""

    def __init__(
        self,
        engine: ServedEngine,
        *,
        admission: RequestAdmission | None = None,
        repository: ModelRepository | None = None,
        read_options: OptionsReader | None = None,
    ) -> None:
        """Without a ``repository``, the engine's models are served as they are."""
        self.engine: Final = engine
        self.admission: Final = admission or RequestAdmission()
        self.repository: Final = repository or ModelRepository(engine)
        self.regions: Final = SharedRegions()
        self.decoder: Final = RequestDecoder(self.regions)
        self.answering: Final = RequestAnswering(
            engine, self.admission, self.repository.catalog, self.decoder
        )
        self.inference: Final = InferenceService(
            engine, self.admission, self.repository.catalog, self.decoder, self.answering
        )
        self.management: Final = ManagementService(
            engine, self.repository, self.admission, self.regions, read_options
        )

    def method(self, name: str) -> Callable[..., Awaitable[Any]]:
        """Return a method of the protocol by name."""
        owner = self.inference if hasattr(self.inference, name) else self.management
        method: Callable[..., Awaitable[Any]] = getattr(owner, name)
        return method

    def close(self) -> None:
        """Close the regions of shared memory."""
        self.regions.close()
