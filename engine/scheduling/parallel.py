"""Parallel batch scheduling: whether a new batch may start while others run (PAME 4.2, 7.8)."""

from __future__ import annotations


class ParallelLimit:
    """PAME's limit τ_b: a batch may start if each running batch has fewer rows than this.

    A small batch leaves the device half idle. A large batch does not; next to it, a second batch
    would make both late. The user sets τ_b (``fixed``), or it follows from the tolerated share of
    samples that are late (``max_violations``, PAME's violation ratio τ_l). Then, after every
    ``WINDOW`` samples with a deadline, τ_b falls by one if more than τ_l of these were late, and
    rises by one if less than half of τ_l were late. (PAME 7.8 varies τ_b by hand: throughput and
    latency both grow with it.) τ_b starts above the largest batch of any model, where it limits
    nothing. It is at least 1; at 1, batches run one after another. With neither option, a batch may
    start on any idle stream.

    All models share one limit. With several ``devices``, the streams are assigned to them in turn,
    and only batches on the same device count.
    """

    WINDOW = 256
    """Number of samples with a deadline between two changes of τ_b."""

    def __init__(
        self,
        max_batch_size: int,
        *,
        fixed: int | None = None,
        max_violations: float | None = None,
        devices: int = 1,
    ) -> None:
        if fixed is not None and max_violations is not None:
            raise ValueError("expected τ_b or the violation ratio that sets it, got both; drop one")
        if fixed is not None and fixed < 1:
            raise ValueError(f"τ_b is {fixed}, expected at least 1")
        if max_violations is not None and not 0.0 < max_violations < 1.0:
            raise ValueError(f"the violation ratio is {max_violations}, expected above 0, below 1")
        self._most = max_batch_size + 1
        self._max_violations = max_violations
        self.value = self._most if fixed is None else fixed
        """Limit τ_b that is in use now."""
        self._devices = devices
        self._running: dict[int, int] = {}
        self._seen = 0
        self._late = 0

    @property
    def adapts(self) -> bool:
        """True if the limit adapts to late samples, and so needs calls of :meth:`observe`."""
        return self._max_violations is not None

    @property
    def limits(self) -> bool:
        """True if a batch may have to wait because of the limit."""
        return self.value < self._most

    def running(self, stream: int, rows: int) -> None:
        """Set the number of rows in a stream's batch; 0 means no batch."""
        if rows:
            self._running[stream] = rows
        else:
            self._running.pop(stream, None)

    def allows(self, stream: int) -> bool:
        """Return whether a batch may start on a stream."""
        if self.value >= self._most:
            return True
        return all(
            rows < self.value
            for other, rows in self._running.items()
            if other != stream and self._share_device(stream, other)
        )

    def shares_failures(self, stream: int, other: int) -> bool:
        """Return whether a failure on a stream may occur on another stream for the same reason.

        True for the stream itself, and with several devices, for all streams on the same device.
        """
        return stream == other or (self._devices > 1 and self._share_device(stream, other))

    def _share_device(self, stream: int, other: int) -> bool:
        return stream % self._devices == other % self._devices

    def observe(self, samples: int, late: int) -> None:
        """Count samples with a deadline that were answered, and how many of them were late.

        Samples that never ran are not counted: they indicate overload, not that parallel batches
        are slow.
        """
        if self._max_violations is None:
            return
        self._seen += samples
        self._late += late
        if self._seen >= self.WINDOW:
            ratio = self._late / self._seen
            if ratio > self._max_violations:
                self.value = max(self.value - 1, 1)
            elif ratio < self._max_violations / 2:
                self.value = min(self.value + 1, self._most)
            self._seen = self._late = 0
