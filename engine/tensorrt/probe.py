"""Is everything there that TensorRT needs? One clear line if not.

Asked before any long work, and before ``tensorrt`` is imported: without a driver
``tensorrt.Runtime()`` ends the whole process (seen in 8.6 and 11.4). So the driver is asked through
ctypes, no CUDA context is made, and the packages are looked for but not imported.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

from offramp.engine.errors import BackendError

INSTALL = "pip install '.[tensorrt]' (for the dot: Offramp's source folder or wheel)"
"""What brings the Python packages."""
PACKAGES = ("tensorrt", "pycuda")
"""What is imported; both come with :data:`INSTALL`."""

_LIBRARY = "libcuda.so.1"
_SUCCESS = 0
_NO_DEVICE = 100
"""``CUDA_ERROR_NO_DEVICE``: the driver is there, a GPU is not."""
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76
"""``CUdevice_attribute`` numbers of the compute capability."""
_NAME_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU, as its driver describes it."""

    index: int
    """Its number among the GPUs that this process may use (``CUDA_VISIBLE_DEVICES``)."""
    name: str
    """For instance ``NVIDIA H200``."""
    compute_capability: tuple[int, int]
    """Major and minor, for instance (9, 0)."""
    driver_version: tuple[int, int]
    """The newest CUDA version that the driver runs, major and minor, for instance (13, 0)."""
    total_bytes: int
    """Memory of the GPU."""

    @property
    def device(self) -> str:
        """The name that users give: ``cuda:0``."""
        return f"cuda:{self.index}"

    @property
    def architecture(self) -> str:
        """What kernels are compiled for, for instance ``sm_90``."""
        return f"sm_{self.compute_capability[0]}{self.compute_capability[1]}"


class Driver(Protocol):
    """The functions of ``libcuda`` that are used, as ctypes gives them; the tests fake them."""

    def cuInit(self, flags: int) -> int: ...  # noqa: D102, N802
    def cuDriverGetVersion(self, version: object) -> int: ...  # noqa: D102, N802
    def cuDeviceGetCount(self, count: object) -> int: ...  # noqa: D102, N802
    def cuDeviceGet(self, device: object, ordinal: int) -> int: ...  # noqa: D102, N802
    def cuDeviceGetName(self, name: object, size: int, device: object) -> int: ...  # noqa: D102, N802
    def cuDeviceGetAttribute(self, value: object, attribute: int, device: object) -> int: ...  # noqa: D102, N802
    def cuDeviceTotalMem_v2(self, size: object, device: object) -> int: ...  # noqa: D102, N802
    def cuGetErrorName(self, error: int, name: object) -> int: ...  # noqa: D102, N802


def parse_device(device: str) -> int:
    """The GPU's number that ``cuda:1`` means; ``cuda`` alone is the first.

    Raises:
        BackendError: It is written otherwise.
    """
    match = re.fullmatch(r"cuda(?::(\d{1,4}))?", device)
    if match is None:
        raise BackendError(f"{device!r} is no device of TensorRT; give cuda:0, cuda:1, …")
    return int(match[1] or 0)


def find_device(index: int) -> Device:
    """Describe a GPU; makes no CUDA context on it.

    Raises:
        BackendError: There is no driver, it does not start, or it has no GPU of that number.
    """
    driver = _load_driver()
    _start(driver)
    count = ctypes.c_int()
    _check(driver, "cuDeviceGetCount", driver.cuDeviceGetCount(ctypes.byref(count)))
    if index >= count.value:
        raise BackendError(_no_such_gpu(index, count.value))
    handle = ctypes.c_int()
    _check(driver, "cuDeviceGet", driver.cuDeviceGet(ctypes.byref(handle), index))
    return Device(
        index=index,
        name=_name(driver, handle),
        compute_capability=(
            _attribute(driver, handle, _CAPABILITY_MAJOR),
            _attribute(driver, handle, _CAPABILITY_MINOR),
        ),
        driver_version=_version(driver),
        total_bytes=_total_bytes(driver, handle),
    )


def missing(index: int = 0) -> list[str]:
    """What is missing for TensorRT on a GPU, the first obstacle first; empty if nothing is."""
    return _look(index)[1]


def missing_packages() -> list[str]:
    """Which of :data:`PACKAGES` cannot be found; none is imported."""
    return [name for name in PACKAGES if find_spec(name) is None]


def require(device: str) -> Device:
    """Describe a GPU on which TensorRT can be used.

    That the packages load as well is seen only when they are imported:
    :func:`offramp.engine.tensorrt.compat.load`.

    Args:
        device: ``cuda:0``, ``cuda:1``, …

    Raises:
        BackendError: Something is missing; one line says all of it, and the remedy.
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


def _load_driver() -> Driver:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise BackendError(
            f"there is no NVIDIA driver here ({_LIBRARY} cannot be loaded), it takes a machine "
            "with an NVIDIA GPU"
        ) from error


def _start(driver: Driver) -> None:
    status = driver.cuInit(0)
    if status == _NO_DEVICE:
        raise BackendError(_no_such_gpu(0, 0))
    _check(driver, "cuInit", status)


def _no_such_gpu(index: int, count: int) -> str:
    if not count:
        return "the NVIDIA driver finds no GPU, look at nvidia-smi and CUDA_VISIBLE_DEVICES"
    there = "only cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
    return f"there is no GPU cuda:{index}, {there}, look at nvidia-smi and CUDA_VISIBLE_DEVICES"


def _check(driver: Driver, function: str, status: int) -> None:
    if status == _SUCCESS:
        return
    name = ctypes.c_char_p()
    known = driver.cuGetErrorName(status, ctypes.byref(name)) == _SUCCESS and name.value
    what = f"{name.value.decode()} ({status})" if known and name.value else f"error {status}"
    raise BackendError(
        f"the NVIDIA driver does not work: {function} gives {what}, nvidia-smi should say why"
    )


def _name(driver: Driver, handle: ctypes.c_int) -> str:
    name = ctypes.create_string_buffer(_NAME_BYTES)
    status = driver.cuDeviceGetName(name, _NAME_BYTES, handle)
    _check(driver, "cuDeviceGetName", status)
    return name.value.decode()


def _attribute(driver: Driver, handle: ctypes.c_int, attribute: int) -> int:
    value = ctypes.c_int()
    status = driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
    _check(driver, "cuDeviceGetAttribute", status)
    return value.value


def _version(driver: Driver) -> tuple[int, int]:
    version = ctypes.c_int()
    status = driver.cuDriverGetVersion(ctypes.byref(version))
    _check(driver, "cuDriverGetVersion", status)
    return version.value // 1000, version.value % 1000 // 10


def _total_bytes(driver: Driver, handle: ctypes.c_int) -> int:
    size = ctypes.c_size_t()
    status = driver.cuDeviceTotalMem_v2(ctypes.byref(size), handle)
    _check(driver, "cuDeviceTotalMem_v2", status)
    return size.value
