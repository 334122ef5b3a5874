"""The file with the state of learning: ``learning.json`` of a learn folder."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Self

from offramp.bundle.files import parse_json, read_limited, write_whole
from offramp.bundle.schema.errors import BundleError
from offramp.engine.learning.lifecycle import Phase

_log = logging.getLogger(__name__)

STATE_NAME: Final = "learning.json"
_MOST_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnState:
    """State from which the next server continues."""

    model_sha256: str
    """Hash of the model's file, and of its weight files."""
    phase: Phase = Phase.RECORDING
    serving: int = 0
    """Number of the serving bundle; 0 is the unmodified model."""
    compiling: int = 0
    """Number of the bundle compiled last, finished or not; 0 is none."""
    failures: int = 0
    """Number of consecutive failed attempts to compile."""
    reason: str = ""
    """Reason why no exit is useful."""
    since_unix_s: float = 0.0
    """Time at which the bundle began to serve."""
    asked: tuple[str, ...] = ()
    """Options that the bundles were compiled with, to detect changed options."""

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Read the file; ``None`` if there is none, or it is unusable."""
        path = folder / STATE_NAME
        try:
            plain = parse_json(read_limited(path, _MOST_BYTES), path.name)
            asked = tuple(map(str, plain["asked"]))
            return cls(**{**plain, "phase": Phase(plain["phase"]), "asked": asked})
        except FileNotFoundError:
            return None
        except (OSError, BundleError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("%s cannot be used (%.200s); learning starts again", path, error)
            return None

    def served(self, number: int) -> Self:
        """Return the state after a bundle begins to serve."""
        return replace(
            self, phase=Phase.SERVING, serving=number, reason="", since_unix_s=time.time()
        )

    def save(self, folder: Path) -> None:
        """Write the file, whole or not at all; OSError if that fails."""
        write_whole(folder / STATE_NAME, json.dumps(asdict(self), indent=1).encode())

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise TypeError(f"{name} is {value!r:.60}")
        if min(self.serving, self.compiling, self.failures) < 0:
            raise ValueError("a number is negative, expected at least 0")


_KINDS: Final = {
    "model_sha256": str,
    "serving": int,
    "compiling": int,
    "failures": int,
    "reason": str,
    "since_unix_s": int | float,
}
"""Types of the fields that are read without conversion."""
