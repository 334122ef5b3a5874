"""Shared parts of tests of learning: a model with a bundle of it, and fake compilations."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from offramp.bundle import Bundle, ExitPolicy, write_bundle

IDLE_REASON = "exits cost more than they save"


def idle_copy(bundle: Bundle, path: Path) -> Bundle:
    """Write a bundle again with no exit in use."""
    names = {entry.path for entry in bundle.manifest.files} - {"policy.json"}
    manifest = replace(bundle.manifest, idle_reason=IDLE_REASON)
    policy = ExitPolicy(version=bundle.policy.version, active=(), promise=None)
    return write_bundle(path, manifest, policy, {name: bundle.read(name) for name in names})


def argument(arguments: Sequence[str], flag: str) -> str:
    """The value of an argument of a compilation."""
    return next(a.partition("=")[2] for a in arguments if a.startswith(f"--{flag}="))


class FakeCompilation:
    """A compilation that ends when a test says how."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)
        self.output = Path(argument(arguments, "output"))
        self.status: int | None = None
        self.said = "nothing was said"
        self.ended = False

    def succeed(self, bundle: Path) -> None:
        shutil.copytree(bundle, self.output)
        self.status = 0

    def fail(self, status: int, said: str = "eecompile: there is no memory") -> None:
        self.status, self.said = status, said

    def poll(self) -> int | None:
        return self.status

    def last_words(self) -> str:
        return self.said

    def end(self) -> None:
        self.ended = True
