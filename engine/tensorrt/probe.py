"""Check that everything that TensorRT needs is present; one line names what is missing.

The check runs before any long work, and before ``tensorrt`` is imported: without a driver,
``tensorrt.Runtime()`` ends the whole process (seen in 8.6 and 11.4). Therefore the driver is called
through ctypes, no CUDA context is made, and the packages are searched for, but not imported.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from offramp.engine.common.errors import BackendError

INSTALL = "pip install '.[tensorrt]' (for the dot: Offramp's source folder or wheel)"
"""Command that installs the Python packages."""
PACKAGES = ("tensorrt", "pycuda")
"""Imported packages; :data:`INSTALL` installs both."""

_LIBRARY = "libcuda.so.1"
_SUCCESS = 0
_NO_DEVICE = 100
"""``CUDA_ERROR_NO_DEVICE``: there is a driver, but no GPU."""
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76
"""``CUdevice_attribute`` numbers of the compute capability."""
_NAME_BYTES = 256


class NoDriverError(BackendError):
    """This machine has no NVIDIA driver, as is normal for a machine without an NVIDIA GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU, as its driver describes it."""

    index: int
    """Number of the GPU among those that this process may use (``CUDA_VISIBLE_DEVICES``)."""
    name: str
    """Name of the GPU, for instance ``NVIDIA H200``."""
    compute_capability: tuple[int, int]
    """Compute capability, major and minor number, for instance (9, 0)."""
    driver_version: tuple[int, int]
    """Newest CUDA version that the driver runs, major and minor, for instance (13, 0)."""
    total_bytes: int

    @property
    def device(self) -> str:
        """Name in options, for instance ``cuda:0``."""
        return f"cuda:{self.index}"

    @property
    def architecture(self) -> str:
        """Architecture for which kernels are compiled, for instance ``sm_90``."""
        return f"sm_{self.compute_capability[0]}{self.compute_capability[1]}"


def parse_device(device: str) -> int:
    """Return the GPU's number in ``cuda:1``; ``cuda`` alone is the first."""
    match = re.fullmatch(r"cuda(?::(\d{1,4}))?", device)
    if match is None:
        raise BackendError(f"{device!r} is not a device of TensorRT; use cuda:0, cuda:1, …")
    return int(match[1] or 0)


def parse_devices(devices: str) -> tuple[int, ...]:
    """Return the numbers of the GPUs in ``cuda:0,cuda:1`` or ``cuda:0``, in this order."""
    found: list[int] = []
    for name in devices.split(","):
        try:
            index = parse_device(name)
        except BackendError as error:
            if name == devices:
                raise
            raise BackendError(f"{devices!r:.100}: {error}") from error
        if index in found:
            raise BackendError(
                f"{devices!r:.100} names cuda:{index} twice, expected each GPU once; several "
                "streams on a GPU are --streams"
            )
        found.append(index)
    return tuple(found)


def find_device(index: int) -> Device:
    """Describe a GPU; makes no CUDA context on it.

    BackendError if there is no driver, the driver does not start, or it has no GPU of that number.
    """
    driver = _load_driver()
    _start(driver)
    count, handle = ctypes.c_int(), ctypes.c_int()
    _ask(driver, "cuDeviceGetCount", ctypes.byref(count))
    if index >= count.value:
        raise BackendError(_no_such_gpu(index, count.value))
    _ask(driver, "cuDeviceGet", ctypes.byref(handle), index)
    name = ctypes.create_string_buffer(_NAME_BYTES)
    _ask(driver, "cuDeviceGetName", name, _NAME_BYTES, handle)
    major, minor, version = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    _ask(driver, "cuDeviceGetAttribute", ctypes.byref(major), _CAPABILITY_MAJOR, handle)
    _ask(driver, "cuDeviceGetAttribute", ctypes.byref(minor), _CAPABILITY_MINOR, handle)
    _ask(driver, "cuDriverGetVersion", ctypes.byref(version))
    total_bytes = ctypes.c_size_t()
    _ask(driver, "cuDeviceTotalMem_v2", ctypes.byref(total_bytes), handle)
    return Device(
        index=index,
        name=name.value.decode(),
        compute_capability=(major.value, minor.value),
        driver_version=(version.value // 1000, version.value % 1000 // 10),
        total_bytes=total_bytes.value,
    )


def missing(index: int = 0) -> list[str]:
    """Return what TensorRT lacks on a GPU, in the order in which it must be fixed."""
    return _look(index)[1]


def missing_packages() -> list[str]:
    """Return those of :data:`PACKAGES` that cannot be found, without importing any."""
    return [name for name in PACKAGES if find_spec(name) is None]


def require(device: str) -> Device:
    """Describe a GPU, such as ``cuda:0``, on which TensorRT can be used.

    Whether the packages can be imported is not checked: see
    :func:`offramp.engine.tensorrt.compat.load`. BackendError if something is missing; one line
    names everything that is missing, and the remedy.
    """
    found, obstacles = _look(parse_device(device))
    if found is None or obstacles:
        raise BackendError(f"TensorRT cannot be used on {device}: {'; '.join(obstacles)}")
    return found


def _look(index: int) -> tuple[Device | None, list[str]]:
    device, obstacles = None, []
    try:
        device = find_device(index)
    except BackendError as error:
        obstacles.append(str(error))
    packages = missing_packages()
    if packages:
        names = " and ".join(packages)
        obstacles.append(f"the Python packages lack {names}: {INSTALL}")
    return device, obstacles


def _load_driver() -> Any:
    """Load the driver's functions through ctypes; tests replace it by a fake."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise NoDriverError(
            f"there is no NVIDIA driver here ({_LIBRARY} cannot be loaded), expected a machine "
            "with an NVIDIA GPU"
        ) from error


def _start(driver: Any) -> None:
    status = driver.cuInit(0)
    if status == _NO_DEVICE:
        raise BackendError(_no_such_gpu(0, 0))
    _check(driver, "cuInit", status)


def _no_such_gpu(index: int, count: int) -> str:
    if not count:
        return "the NVIDIA driver finds no GPU, check nvidia-smi and CUDA_VISIBLE_DEVICES"
    there = "only cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
    return f"there is no GPU cuda:{index}, {there}, check nvidia-smi and CUDA_VISIBLE_DEVICES"


def _ask(driver: Any, function: str, *arguments: object) -> None:
    _check(driver, function, getattr(driver, function)(*arguments))


def _check(driver: Any, function: str, status: int) -> None:
    if status == _SUCCESS:
        return
    name = ctypes.c_char_p()
    known = driver.cuGetErrorName(status, ctypes.byref(name)) == _SUCCESS and name.value
    what = f"{name.value.decode()} ({status})" if known and name.value else f"error {status}"
    raise BackendError(
        f"the NVIDIA driver does not work: {function} returns {what}, check nvidia-smi"
    )
