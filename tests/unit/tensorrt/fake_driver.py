"""A stand-in for ``libcuda.so.1`` as ctypes gives it, with GPUs that are described in Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NO_DEVICE = 100
MISMATCH = 803


@dataclass
class FakeDriver:
    """Functions of libcuda; pointers come as ``ctypes.byref`` makes them."""

    names: tuple[str, ...] = ("NVIDIA H200",)
    capability: tuple[int, int] = (9, 0)
    version: int = 13000
    total_bytes: int = 140 << 30
    start: int = 0
    """Result of ``cuInit``."""
    calls: list[str] = field(default_factory=list)

    def cuInit(self, flags: int) -> int:  # noqa: N802
        self.calls.append("cuInit")
        return self.start

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        assert self.calls == ["cuInit"], "not initialised"
        count._obj.value = len(self.names)
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:  # noqa: N802
        name.value = self.names[device.value].encode()[: size - 1]
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:  # noqa: N802
        value._obj.value = {75: self.capability[0], 76: self.capability[1]}[attribute]
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, device: Any) -> int:  # noqa: N802
        size._obj.value = self.total_bytes
        return 0

    def cuGetErrorName(self, error: int, name: Any) -> int:  # noqa: N802
        if error != MISMATCH:
            return 1
        name._obj.value = b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
        return 0
