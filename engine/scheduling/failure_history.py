"""Failures of requests by their own data, and what follows for batches that are formed next.

A request that fails takes its batch with it, and all of the batch runs again, in halves. That costs
little while it is rare. Where a good part of all requests fail, fewer requests share a batch: group
testing (Dorfman, 1943) pays only while most groups have no member that fails. Second tries of
requests that failed alone are worth it while some of them succeed.
"""

from __future__ import annotations

from typing import Final

_MEMORY: Final = 1 / 64
"""Weight of one request in the share of those that fail."""
_EXPECTED: Final = 0.125
"""Failing requests in a batch, on average, above which fewer requests share one. A failing batch of
eight costs up to three times its own time (``tests/unit/scheduling/test_failing_requests.py``)."""
_LEAST_SHARE: Final = 1e-3
"""Share of failing requests that counts as none."""
_IN_VAIN: Final = 3
"""Second tries that fail in a row, after which there is one at a time."""
_ANY_NUMBER: Final = 2**31


class FailureHistory:
    """The share of requests that failed by themselves of late, and the luck of second tries."""

    def __init__(self) -> None:
        self._share = 0.0
        self._in_vain = 0
        self.together = _ANY_NUMBER
        """Most requests that a new batch is formed of."""

    def succeeded(self, samples: int) -> None:
        """Count samples that were answered; each stands for a request."""
        if self._share:
            share = self._share * (1.0 - _MEMORY) ** samples
            self._set(share if share > _LEAST_SHARE else 0.0)

    def failed(self) -> None:
        """Count a request that failed alone, for good."""
        self._set(self._share + _MEMORY * (1.0 - self._share))

    def tried_again(self, *, succeeded: bool) -> None:
        """Note what the second try of a request led to that had failed alone."""
        self._in_vain = 0 if succeeded else self._in_vain + 1

    def allows_try(self, *, waiting: bool) -> bool:
        """Whether a request that failed alone is tried again; ``waiting``: another already is."""
        return self._in_vain < _IN_VAIN or not waiting

    def _set(self, share: float) -> None:
        self._share = share
        self.together = max(1, int(_EXPECTED / share)) if share else _ANY_NUMBER
