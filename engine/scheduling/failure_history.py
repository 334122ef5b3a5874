"""History of requests that failed because of their own data, and limits on new batches.

If a request fails, its whole batch fails and runs again, in halves. That costs little while
failures are rare. If a considerable share of requests fails, fewer requests share a batch: group
testing (Dorfman, 1943) pays only while most groups have no failing member. Requests that failed
alone get a second try as long as some second tries succeed.
"""

from __future__ import annotations

from typing import Final

_MEMORY: Final = 1 / 64
"""Weight of one request in the share of failing requests."""
_EXPECTED: Final = 0.125
"""If a batch contains more failing requests than this in the mean, fewer requests share a batch. A
failing batch of eight costs up to three times its own time
(``tests/unit/scheduling/test_failing_requests.py``).
"""
_LEAST_SHARE: Final = 1e-3
"""If the share of failing requests is below this, no request counts as failing."""
_IN_VAIN: Final = 3
"""After this number of failed second tries in a row, at most one second try is pending."""
_ANY_NUMBER: Final = 2**31


class FailureHistory:
    """The recent share of requests that failed alone, and the success of second tries."""

    def __init__(self) -> None:
        self._share = 0.0
        self._in_vain = 0
        self.together = _ANY_NUMBER
        """Largest number of requests in a new batch."""

    def succeeded(self, samples: int) -> None:
        """Count samples that were answered; each counts as one request."""
        if self._share:
            share = self._share * (1.0 - _MEMORY) ** samples
            self._set(share if share > _LEAST_SHARE else 0.0)

    def failed(self) -> None:
        """Count a request that failed alone and is not tried again."""
        self._set(self._share + _MEMORY * (1.0 - self._share))

    def record_retry(self, *, succeeded: bool) -> None:
        """Record the result of a second try of a request that had failed alone."""
        self._in_vain = 0 if succeeded else self._in_vain + 1

    def allows_try(self, *, waiting: bool) -> bool:
        """Return whether to retry a request that failed alone; ``waiting`` if another waits."""
        return self._in_vain < _IN_VAIN or not waiting

    def _set(self, share: float) -> None:
        self._share = share
        self.together = max(1, int(_EXPECTED / share)) if share else _ANY_NUMBER
