"""Protocol methods other than inference: statistics, repository, shared memory, settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio

from offramp.engine.common.errors import BadInputError
from offramp.engine.models.options import ModelOptions
from offramp.proto import messages
from offramp.server.common.errors import UnsupportedError
from offramp.server.common.served import ServedEngine
from offramp.server.repository.repository import ModelRepository
from offramp.server.requests.admission import RequestAdmission
from offramp.server.requests.shared_memory import SharedRegions
from offramp.server.services.model_statistics import write_statistics
from offramp.server.services.runtime_settings import LogLevels

_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

OptionsReader: TypeAlias = Callable[[str, dict[str, Any], ModelOptions], ModelOptions]
"""Function that applies settings of a model, for instance from a configuration file, to other
options; the first argument is the source of the settings, for messages."""

_NO_CUDA: Final = (
    "CUDA shared memory is not supported: an engine's inputs come from the host's memory; "
    "register system shared memory instead"
)


class ManagementService:
    """One method per call of the protocol, named as in ``inference.proto``."""

    def __init__(
        self,
        engine: ServedEngine,
        repository: ModelRepository,
        admission: RequestAdmission,
        regions: SharedRegions,
        read_options: OptionsReader | None = None,
    ) -> None:
        """``read_options`` parses options that clients send with a load; ``None`` refuses them."""
        self._engine = engine
        self._repository = repository
        self._admission = admission
        self._regions = regions
        self._read_options = read_options
        self._log_levels = LogLevels()

    async def ModelStatistics(  # noqa: N802 - the protocol's name
        self, request: messages.ModelStatisticsRequest, _context: _Context
    ) -> messages.ModelStatisticsResponse:
        """Return counts and times since the load, of one model or of all models."""
        catalog = self._repository.catalog
        if request.name:
            catalog.find(request.name, request.version)
        statistics = self._engine.statistics()
        return messages.ModelStatisticsResponse(
            model_stats=[
                write_statistics(
                    served,
                    statistics[served.engine_name],
                    self._admission.last_answers.get(served.name, 0.0),
                )
                for served in catalog
                if request.name in ("", served.name) and request.version in ("", served.version)
            ]
        )

    async def RepositoryIndex(  # noqa: N802
        self, request: messages.RepositoryIndexRequest, _context: _Context
    ) -> messages.RepositoryIndexResponse:
        """Return every version of every model, with its state."""
        index = await self._repository.index(ready=request.ready)
        response = messages.RepositoryIndexResponse()
        for entry in index:
            response.models.add(
                name=entry.name, version=entry.version, state=entry.state, reason=entry.reason
            )
        return response

    async def RepositoryModelLoad(  # noqa: N802
        self, request: messages.RepositoryModelLoadRequest, _context: _Context
    ) -> messages.RepositoryModelLoadResponse:
        """Load a model, or reload it if its files or options have changed."""
        override = self._override(request)
        await self._repository.load(request.model_name, override)
        return messages.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(  # noqa: N802
        self, request: messages.RepositoryModelUnloadRequest, _context: _Context
    ) -> messages.RepositoryModelUnloadResponse:
        """Accept no more requests for a model; earlier requests are answered."""
        await self._repository.unload(request.model_name)
        return messages.RepositoryModelUnloadResponse()

    async def SystemSharedMemoryStatus(  # noqa: N802
        self, request: messages.SystemSharedMemoryStatusRequest, _context: _Context
    ) -> messages.SystemSharedMemoryStatusResponse:
        """Return the registered regions."""
        response = messages.SystemSharedMemoryStatusResponse()
        for region in self._regions.status(request.name):
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.size_bytes
        return response

    async def SystemSharedMemoryRegister(  # noqa: N802
        self, request: messages.SystemSharedMemoryRegisterRequest, _context: _Context
    ) -> messages.SystemSharedMemoryRegisterResponse:
        """Open a region of POSIX shared memory."""
        self._regions.register(
            request.name, request.key, offset=request.offset, size_bytes=request.byte_size
        )
        return messages.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(  # noqa: N802
        self, request: messages.SystemSharedMemoryUnregisterRequest, _context: _Context
    ) -> messages.SystemSharedMemoryUnregisterResponse:
        """Close one region, or all regions."""
        self._regions.unregister(request.name)
        return messages.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(  # noqa: N802
        self, request: messages.CudaSharedMemoryStatusRequest, _context: _Context
    ) -> messages.CudaSharedMemoryStatusResponse:
        """Return no regions, since none can be registered."""
        if request.name:
            raise BadInputError(f"there is no CUDA shared memory region {request.name!r}")
        return messages.CudaSharedMemoryStatusResponse()

    async def CudaSharedMemoryRegister(  # noqa: N802
        self, _request: messages.CudaSharedMemoryRegisterRequest, _context: _Context
    ) -> messages.CudaSharedMemoryRegisterResponse:
        """Raise UnsupportedError: requests cannot refer to CUDA memory."""
        raise UnsupportedError(_NO_CUDA)

    async def CudaSharedMemoryUnregister(  # noqa: N802
        self, _request: messages.CudaSharedMemoryUnregisterRequest, _context: _Context
    ) -> messages.CudaSharedMemoryUnregisterResponse:
        """Do nothing, as Triton does if no region has the name."""
        return messages.CudaSharedMemoryUnregisterResponse()

    async def TraceSetting(  # noqa: N802
        self, request: messages.TraceSettingRequest, _context: _Context
    ) -> messages.TraceSettingResponse:
        """Change and return the trace settings, which apply to all models."""
        if request.model_name:
            self._repository.catalog.find(request.model_name)
        if request.settings and request.model_name:
            raise BadInputError(
                f"trace settings of model {request.model_name!r} cannot be changed alone: they "
                "apply to all models; leave model_name empty"
            )
        traces = self._admission.traces
        traces.change({key: list(value.value) for key, value in request.settings.items()})
        response = messages.TraceSettingResponse()
        for key, values in traces.settings().items():
            response.settings[key].value.extend(values)
        return response

    async def LogSettings(  # noqa: N802
        self, request: messages.LogSettingsRequest, _context: _Context
    ) -> messages.LogSettingsResponse:
        """Change and return the settings of the log."""
        wanted = {}
        for key, given in request.settings.items():
            kind = given.WhichOneof("parameter_choice")
            wanted[key] = None if kind is None else getattr(given, kind)
        self._log_levels.change(wanted)
        response = messages.LogSettingsResponse()
        for key, setting in self._log_levels.settings().items():
            value = response.settings[key]
            if isinstance(setting, bool):
                value.bool_param = setting
            elif isinstance(setting, int):
                value.uint32_param = setting
            else:
                value.string_param = setting
        return response

    def _override(self, request: messages.RepositoryModelLoadRequest) -> ModelOptions | None:
        """Return the options sent with a load, or ``None``; BadInputError if they are invalid."""
        if others := [name for name in request.parameters if name != "config"]:
            raise BadInputError(
                f"load parameter {others[0]!r:.80} is not supported; files of models are read from "
                "the repository, and settings are sent as the string parameter 'config'"
            )
        if "config" not in request.parameters:
            return None
        where = f"parameter 'config' of model {request.model_name!r}"
        try:
            settings = json.loads(request.parameters["config"].string_param)
        except ValueError as error:
            raise BadInputError(f"{where} is not JSON: {error}") from None
        if not isinstance(settings, dict) or self._read_options is None:
            raise BadInputError(f"{where} is not a JSON object of settings")
        try:
            return self._read_options(
                where, settings, self._repository.options_of(request.model_name)
            )
        except ValueError as error:
            raise BadInputError(str(error)) from None
