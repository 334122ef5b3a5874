"""The small model that campaigns ask, and its right answers; the same bytes every time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import ActiveExit, Bundle
from offramp.client.conversion import build_request
from offramp.proto import messages
from tests.chaos.truth import Truth
from tests.engines import engine_bundle
from tests.fuzz.mutators import protobuf
from tests.sliced import inputs_of, sliced

MODEL: Final = "small"
METHODS: Final = ("ModelInfer", "ModelStreamInfer", "ModelMetadata", "ModelConfig", "ModelReady")
ALLOWED: Final = frozenset(
    {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
)
"""Statuses that a client may bring upon itself; DEADLINE_EXCEEDED, where it names a deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A bundle and what is known of it."""

    bundle: Bundle
    truth: Truth

    @classmethod
    def write(cls, folder: Path) -> Subject:
        """Write the bundle; no training, so it takes a moment."""
        active = (ActiveExit(exit=0, threshold=0.4), ActiveExit(exit=1, threshold=0.5))
        bundle = engine_bundle("mlp", folder / f"{MODEL}.ee", active=active)
        return cls(bundle=bundle, truth=Truth.of(bundle, inputs_of(sliced("mlp"), 200)))

    def request(self, rows: list[int]) -> Any:
        """The message that asks for some of the truth's inputs."""
        inputs: dict[str, NDArray[Any]] = self.truth.take(rows)
        return build_request(
            MODEL, inputs, outputs=[self.truth.output], priority=0, deadline_s=None
        )

    def seeds(self) -> list[bytes]:
        """Cases of every method; the first byte is the method's number."""
        found = []
        for rows in ([0], [1, 2, 3]):
            request = self.request(rows)
            request.id = "7"
            request.parameters["priority"].uint64_param = 3
            request.parameters["timeout"].int64_param = 20_000_000
            request.inputs[0].parameters["x"].string_param = "y"
            found += [case_of(method, request) for method in METHODS[:2]]
            del request.raw_input_contents[:]
            values = np.concatenate([a.ravel() for a in self.truth.take(rows).values()])
            request.inputs[0].contents.fp32_contents.extend(values.tolist())
            found += [case_of(method, request) for method in METHODS[:2]]
        named = messages.ModelMetadataRequest(name=MODEL, version="1")
        return [*found, *(case_of(method, named) for method in METHODS[2:])]


def case_of(method: str, message: Any) -> bytes:
    """A case is the number of the method, then the message."""
    return bytes((METHODS.index(method),)) + bytes(message.SerializeToString())


def method_of(case: bytes) -> str:
    """The method of a case."""
    return METHODS[case[0] % len(METHODS)] if case else METHODS[0]


def mutate(case: bytes, random: Any) -> bytes:
    """Another message, of the same method."""
    return case[:1] + protobuf(case[1:], random)
