"""The file in which a joint training is kept, so that an interrupted run goes on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointState:
    """The file in which a training is kept after every epoch."""

    path: Path
    digest: str
    """Of all that it depends on: a file of another one is not read."""

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace what is kept; a warning if that fails, and training goes on."""
        beside = self.path.with_name(self.path.name + ".new")
        try:
            torch.save({"digest": self.digest, "state": dict(state)}, beside)
            beside.replace(self.path)
        except (OSError, RuntimeError) as error:  # torch has no other for a full disk
            reason = str(error).splitlines()[0]
            _log.warning(
                "%s cannot be written (%s): an interrupted run loses this.", beside, reason
            )
            beside.unlink(missing_ok=True)

    def read(self) -> dict[str, Any] | None:
        """Give what is kept; ``None`` if nothing is, or it is of another training or broken."""
        if not self.path.exists():
            return None
        try:  # tensors, numbers and names alone: it runs no code
            kept = torch.load(self.path, weights_only=True)
            digest, state = kept["digest"], kept["state"]
        except Exception as error:  # pickle, zip and torch have errors of many classes
            reason = str(error).splitlines()[0]
            _log.warning("%s cannot be read (%s): training begins anew.", self.path, reason)
            return None
        if digest != self.digest:
            _log.warning("%s is of another training: this one begins anew.", self.path)
            return None
        found: dict[str, Any] = state
        return found
