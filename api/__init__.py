"""The Python API: compile, load and serve; its main names are also in :mod:`offramp`."""

from offramp.api.errors import (
    ExportCheckError,
    ForkedError,
    ModelClosedError,
    ModuleExportError,
)

__all__ = ["ExportCheckError", "ForkedError", "ModelClosedError", "ModuleExportError"]
