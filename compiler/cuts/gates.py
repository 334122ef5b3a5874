"""Gates: the tensors that everything passes through, and the orders in which they are looked for.

In most models one tensor carries everything onward between two blocks (Apparate 3.1). Where
branches run beside each other for long (two towers, convolutions of several widths, a decoder
beside what it attends to) none does, and a gate is the set of tensors that are still to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offramp.compiler.graphs.graph import Operator


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Main tensors that every path from the main inputs to the answer passes through."""

    tensors: tuple[str, ...]
    """The first is written by the gate's step; no tensor is the first of two gates."""
    step: int
    """Index in :attr:`~offramp.compiler.cuts.flow.Flow.steps` of the operator before the gate."""
    alone: bool
    """Whether one tensor carries everything. Else there are several, or main inputs beside one."""
    side_inputs: frozenset[str]
    """Graph inputs that the operators after it need besides the tensors."""
    side_flops: float
    """Cost of the side operators that the operators after it need."""

    @property
    def tensor(self) -> str:
        """The tensor that the gate's step writes."""
        return self.tensors[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """What is still to be read after a step."""

    tensors: tuple[str, ...]
    """Those that steps wrote; the first by this one."""
    inputs: frozenset[str]
    """Main inputs."""

    @property
    def alone(self) -> bool:
        """Whether it is one tensor."""
        return len(self.tensors) == 1 and not self.inputs


class SetSearch(NamedTuple):
    """How gates of several tensors are looked for."""

    most_tensors: int
    is_heavy: Callable[[Operator], bool]
    """Whether a step does work."""
    is_lazy: Callable[[Operator], bool]
    """Whether a step had better wait until it is needed, as one that only rearranges values."""
    interleaved: bool
    """Whether steps that do work are ordered by progress: branches that exporters write one after
    the other advance side by side then, so that a set knows something of all of them."""


def gates_of(
    steps: Sequence[Operator],
    main_inputs: Sequence[str],
    outputs: Sequence[str],
    reads: Sequence[Sequence[str]],
    most_tensors: int,
) -> dict[int, Unread]:
    """Find the steps after which few tensors are still to be read, and those tensors.

    ``reads`` are, by step, the main tensors and inputs that it waits for. Where a single tensor is
    left, everything passes through it whatever the topological order: every operator here lies on a
    path to the answer, so that it comes either before or after that tensor. Sets, of at most
    ``most_tensors``, are those of this order, in which each holds all that the later ones are
    computed from. None is a gate before all main inputs were read: an exit there would not know
    the others.
    """
    last = {tensor: i for i, read in enumerate(reads) for tensor in read}
    unread = {name for name in main_inputs if name in last}
    inputs = set(unread)
    ends: dict[int, list[str]] = {}
    for tensor, step in last.items():
        ends.setdefault(step, []).append(tensor)
    written: dict[str, None] = {}
    found: dict[int, Unread] = {}
    for i, op in enumerate(steps):
        unread.difference_update(reads[i])
        for tensor in ends.get(i, ()):
            written.pop(tensor, None)
            inputs.discard(tensor)
        new = [t for t in op.writes if t in last or t in outputs]
        written.update(dict.fromkeys(new))
        if not new or len(written) > most_tensors:
            continue
        others = [t for t in written if t != new[0]]
        here = Unread(tensors=(new[0], *others), inputs=frozenset(inputs))
        if here.alone or (most_tensors > 1 and not unread):
            found[i] = here
    return found


def arranged(
    steps: Sequence[Operator],
    reads: Sequence[Sequence[str]],
    costs: Sequence[float],
    search: SetSearch,
) -> tuple[int, ...]:
    """Order steps so that few tensors wait between those that do the work; gives their places.

    Cheap steps come as soon as they can where that leaves no more tensors waiting, as the pooling
    of a branch before the next one begins; else when they are needed. ``reads`` are, by step, the
    main tensors that it waits for; ``costs`` are by operator.
    """
    order = _Arrangement(steps, reads, search)
    worked = [i for i, op in enumerate(steps) if search.is_heavy(op)]
    if search.interleaved:
        worked.sort(key=_progress([costs[op.index] for op in steps], order.sources).__getitem__)
    for i in (*worked, *range(len(steps))):
        order.reach(i)
    return tuple(order.places)


class _Arrangement:
    """Steps in the order in which they are needed, or cost nothing."""

    def __init__(
        self,
        steps: Sequence[Operator],
        reads: Sequence[Sequence[str]],
        search: SetSearch,
    ) -> None:
        self._steps, self._reads, self._search = steps, reads, search
        writer = {t: i for i, op in enumerate(steps) for t in op.writes}
        self.sources = [sorted({writer[t] for t in op.reads if t in writer}) for op in steps]
        self._readers: dict[str, list[int]] = {}
        for i, read in enumerate(reads):
            for tensor in read:
                self._readers.setdefault(tensor, []).append(i)
        self._left = {tensor: len(readers) for tensor, readers in self._readers.items()}
        self._missing = [len(sources) for sources in self.sources]
        self._done = [False] * len(steps)
        self.places: list[int] = []

    def reach(self, step: int) -> None:
        """Take a step after all that it needs."""
        pending = [step]
        while pending:
            i = pending[-1]
            needed = [j for j in self.sources[i] if not self._done[j]]
            if needed:
                pending += reversed(needed)
                continue
            pending.pop()
            self._take(i)

    def _take(self, step: int) -> None:
        """Take a step, and cheap ones behind it that leave no more tensors waiting."""
        ready = [step]
        while ready:
            i = ready.pop()
            if self._done[i]:
                continue
            self._done[i] = True
            self.places.append(i)
            for tensor in self._reads[i]:
                self._left[tensor] -= 1
            written = self._steps[i].writes
            behind = sorted({r for t in written for r in self._readers.get(t, ())})
            for reader in behind:
                self._missing[reader] -= 1
            ending = (t for t in self._reads[i] if self._left[t] == 1)
            among = {r for t in ending for r in self._readers[t]} | set(behind)
            ready += sorted((r for r in among if self._is_free(r)), reverse=True)

    def _is_free(self, step: int) -> bool:
        """Whether a step can be taken, does no work, and leaves no more tensors waiting."""
        op = self._steps[step]
        if self._done[step] or self._missing[step]:
            return False
        if self._search.is_heavy(op) or self._search.is_lazy(op):
            return False
        used = [t for t in op.writes if self._readers.get(t)]
        ended = [t for t in self._reads[step] if self._left[t] == 1]
        return len(used) <= len(ended)


def _progress(costs: Sequence[float], sources: Sequence[Collection[int]]) -> list[float]:
    """By step, the share of the work of the longest path by it that is done when it ends."""
    before, after = [0.0] * len(costs), [0.0] * len(costs)
    for i, behind in enumerate(sources):
        before[i] = max((before[j] for j in behind), default=0.0) + costs[i]
    for i in range(len(costs) - 1, -1, -1):
        for j in sources[i]:
            after[j] = max(after[j], after[i] + costs[i])
    return [b / (b + a) if b + a else 0.0 for b, a in zip(before, after, strict=True)]
