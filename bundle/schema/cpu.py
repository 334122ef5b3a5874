"""The instructions of a CPU that int8 answers depend on, as a bundle names those of its compiler's.

:func:`offramp.engine.common.environment.cpu_features` reads those of this machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CPU_FLAGS: Final = {
    "avx2": "AVX2",
    "avx512f": "AVX512",
    "avx_vnni": "AVX_VNNI",
    "avx512_vnni": "AVX512_VNNI",
    "avx_vnni_int8": "AVX_VNNI_INT8",
    "amx_int8": "AMX_INT8",
    "avx512_bf16": "AVX512_BF16",
    "amx_bf16": "AMX_BF16",
    "avx512_fp16": "AVX512_FP16",
    "amx_fp16": "AMX_FP16",
    "asimddp": "DOTPROD",
    "i8mm": "I8MM",
    "bf16": "BF16",
    "asimdhp": "FP16",
}
"""Linux's words for the instructions of interest, and the vendors'."""
_SUMS_IN_INT32: Final = {"AVX_VNNI", "AVX512_VNNI", "AVX_VNNI_INT8", "AMX_INT8"}
_MOST_NAMES: Final = 64
_MOST_LETTERS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFeatures:
    """Instructions of a CPU that its precision depends on: facts; kinds of int8 are measured."""

    machine: str
    """Of Python's ``platform.machine()``."""
    names: tuple[str, ...] | None
    """Those of interest that it has; ``None`` where that is not known."""

    def __post_init__(self) -> None:
        names = (self.machine, *(self.names or ()))
        if len(names) > _MOST_NAMES or any(len(name) > _MOST_LETTERS for name in names):
            raise ValueError(
                f"names {names!s:.100} are more than {_MOST_NAMES}, or longer than "
                f"{_MOST_LETTERS} letters"
            )

    @property
    def saturates(self) -> bool | None:
        """Whether products of uint8 and int8 may be clipped to int16; ``None`` if not known.

        Without VNNI, x86 adds pairs of them in int16: weights of 8 bits overflow there, and int8
        agrees less than it does elsewhere.
        """
        if self.names is None:
            return None
        return self.machine in {"x86_64", "AMD64"} and _SUMS_IN_INT32.isdisjoint(self.names)

    def describe(self) -> str:
        """Say it in a line."""
        if self.names is None:
            return f"{self.machine}, instructions unknown (no /proc/cpuinfo)"
        return f"{self.machine} with {', '.join(self.names) or 'none of interest'}"
