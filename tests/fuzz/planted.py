"""Readers that are wrong on purpose: what the fuzzing has to notice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from random import Random

from tests.fuzz.campaign import WrongError
from tests.fuzz.mutators import havoc


class Planted:
    """Reads anything, and is never wrong."""

    def seeds(self) -> Sequence[bytes]:
        return [b"abcdefgh"]

    def mutate(self, case: bytes, random: Random) -> bytes:
        return havoc(case, random)

    def check(self, case: bytes) -> str:
        return "read"

    def close(self) -> None:
        pass


class Raises(Planted):
    """Trusts a length."""

    def check(self, case: bytes) -> str:
        return f"read:{case[7]}"


class AnswersWrongly(Planted):
    """Reports a wrong answer itself."""

    def check(self, case: bytes) -> str:
        if len(case) > 64:
            raise WrongError("an answer of somebody else")
        return "read"


class Ends(Planted):
    """Takes the process with it."""

    def check(self, case: bytes) -> str:
        if len(case) > 64:
            os.abort()
        return "read"


class TakesMemory(Planted):
    """Believes a size."""

    def check(self, case: bytes) -> str:
        if len(case) > 64:
            bytearray(2**40)
        return "read"
