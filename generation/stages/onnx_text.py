"""The backend of generating models on ONNX Runtime, on the CPU.

A stage is a session of its layers; exits share one session of norm and LM head, unless they have
their own head. If an exit has a judge, the head runs only for tokens that leave.

For each slot and stage, the number of filled positions is recorded. A stage runs all positions that
it has not filled yet, up to the position of the sequence's token. With state propagation that is
only the token, because skipped layers are filled when a token leaves. With catch-up it includes
earlier tokens that left before the stage; their states are kept for this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.engine.backends.host import LoadedGraph
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.errors import BackendError
from offramp.engine.graphs.external_weights import is_text
from offramp.generation.bundle.generating_bundle import GeneratingBundle
from offramp.generation.bundle.tensor_names import (
    ANSWER,
    CONFIDENCE,
    IDS,
    MASK,
    NEXT_STATE,
    POSITIONS,
    PREVIOUS_STATE,
    SOURCE_MASK,
    STATE,
    cross_name,
    past_name,
    size_name,
)
from offramp.generation.bundle.text_model import TextModel
from offramp.generation.stages.cache_slots import CacheSlots, IntArray, Span, padded_rows
from offramp.generation.stages.text_backend import NO_TOKEN, TokenAnswers

_CLOSED: Final = -1
_ZERO: Final = np.float32(0)
_SLOT_0: Final = np.zeros(1, np.int64)
Arrays: TypeAlias = dict[str, NDArray[Any]]


class _Graph:
    """A loaded graph, which selects the inputs that it reads."""

    def __init__(self, graph: LoadedGraph) -> None:
        self.read = frozenset(graph.read)
        self.sizes = tuple(s for s in ("tokens", "past", "source") if size_name(s) in graph.read)
        """Sizes that the graph reads from additional inputs."""
        self._fed, self._given, self._execute = tuple(graph.read), list(graph.given), graph.execute

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> Arrays:
        outputs = self._execute(self._given, {name: feeds[name] for name in self._fed}, None)
        return dict(zip(self._given, outputs, strict=True))


class _Source(NamedTuple):
    """Inputs of a stage that come from prompts, kept while the stage runs on the same rows."""

    slots: list[int]
    feeds: Arrays


class OnnxTextBackend:
    """Runs a generating model on the CPU: a :class:`~.text_backend.TextBackend`."""

    def __init__(
        self,
        model: TextModel,
        read: Callable[[str], bytes],
        *,
        slots: int,
        length: int,
        source_length: int = 0,
        threads: int = 1,
        weights: Path | None = None,
    ) -> None:
        """Load all graphs and allocate the caches.

        ``read`` returns a graph by its file; ``weights`` is the folder of the weights that graphs
        refer to. ``length`` is in tokens of prompt and answer, or of the answer only for an
        encoder-decoder, with ``source_length`` for its prompt. If the model accepts fewer tokens,
        for instance because its table of positions ends, the attributes ``length`` and
        ``longest_prompt`` are reduced to what it accepts. Raise BackendError if a graph cannot be
        loaded.
        """
        if slots < 1 or length < 2 or (model.encoder and source_length < 1):
            raise BackendError(
                f"{slots} slots of {length} tokens and prompts of {source_length} were asked for, "
                "expected at least 1 slot of 2 tokens, and prompts of 1 for an encoder-decoder"
            )
        self.model = model
        self.stages, self.slots = len(model.stages), slots
        self.prompt_in_slot = not model.encoder
        self.vocabulary = model.vocabulary
        self.ragged = model.ragged
        self._start = 0 if model.start_token is None else model.start_token
        self._catches_up = model.skipped == "catch-up"
        runtime = OnnxRuntimeBackend(threads=threads)

        def load(name: str) -> _Graph | None:
            if not name:
                return None
            try:
                return _Graph(runtime.load(read(name), weights))
            except Exception as error:  # ONNX Runtime's own classes derive from Exception only
                reason = " ".join(str(error).split())
                raise BackendError(f"{name} cannot be loaded: {reason}") from error

        self._segments = [_present(load(stage.file)) for stage in model.stages]
        self._layers = [model.layers_of(stage) for stage in range(self.stages)]
        self._adapters = [load(stage.adapter) for stage in model.stages]
        self._heads = [load(stage.head) for stage in model.stages]
        self._judges = [load(stage.judge) for stage in model.stages]
        self._fills = [
            None if self._catches_up else load(stage.propagation) for stage in model.stages
        ]
        self._head, self._encoder = _present(load(model.head)), load(model.encoder)
        self._allocate(slots, length, source_length)  # too large caches fail here, not in a step
        if model.encoder:
            source_length = self._most(self._try_prompt, source_length)
        self.length = self._most(self._try_place, length, least=2)
        self.longest_prompt = source_length if model.encoder else self.length - 1
        self._allocate(slots, self.length, source_length)

    def _release(self) -> None:
        """Release the key-value caches and kept states of all slots."""
        self._sources: dict[int, _Source] = {}
        """Inputs from prompts by stage."""
        self._states: list[NDArray[np.float32]] = []
        """Inputs of stages 1 and later, for all positions or only for the last token."""
        self._caches = self._cross = CacheSlots([], past_name, slots=0, length=0)

    def _allocate(self, slots: int, length: int, source_length: int) -> None:
        """Allocate the caches of all slots, which must be free; they replace existing caches."""
        self._release()
        model = self.model
        self._caches = CacheSlots([(x.heads, x.size) for x in model.layers], past_name,
                                  slots=slots, length=length)  # fmt: skip
        crossed = [(x.cross_heads, x.cross_size) for x in model.layers if x.cross_heads]
        self._cross = CacheSlots(crossed, cross_name, slots=slots, length=source_length)
        self._source = np.zeros(slots, np.int64)
        """Number of prompt tokens of an encoder-decoder, by slot."""
        kept = length if self._catches_up else 1
        self._states = [np.zeros((slots, kept, model.width), np.float32) for _ in model.stages[1:]]
        self._place = np.full(slots, _CLOSED)
        """Position of the running token, by slot."""
        self._filled = np.zeros((self.stages, slots), np.int64)
        """int64 [stages, slots]: number of positions with keys and values in the layers of a
        stage."""
        self._next = np.zeros(slots, np.int64)
        self._prompts: dict[int, IntArray] = {}
        self._counts = dict.fromkeys(
            ("prefilled", "propagated", "caught_up", "padding", "headed", "layer_tokens"), 0
        )
        self._run_rows = [0] * self.stages

    @classmethod
    def of(
        cls,
        bundle: GeneratingBundle,
        *,
        slots: int,
        length: int,
        source_length: int = 0,
        threads: int = 1,
    ) -> Self:
        """Load a bundle; sessions map its weights into memory. Otherwise as :meth:`__init__`."""
        folder = bundle.weight_folder()
        named = folder is not None and is_text(folder)
        return cls(
            bundle.model,
            bundle.graph if named else bundle.whole_graph,
            slots=slots,
            length=length,
            source_length=source_length,
            threads=threads,
            weights=folder if named else None,
        )

    def open(self, slot: int, inputs: NDArray[np.int64]) -> None:
        """Start a sequence in a free slot; BackendError if its prompt is invalid or too long."""
        prompt = np.asarray(inputs, np.int64)
        if prompt.ndim != 1 or not 1 <= len(prompt) <= self.longest_prompt:
            raise BackendError(
                f"the prompt has shape {list(prompt.shape)}, expected 1 to {self.longest_prompt} "
                "tokens: shorten it, or serve with longer slots"
            )
        if prompt.min() < 0 or prompt.max() >= self.vocabulary:
            raise BackendError(
                f"the prompt has tokens from {prompt.min()} to {prompt.max()}, expected 0 to "
                f"{self.vocabulary - 1}"
            )
        if self._place[slot] != _CLOSED:
            raise BackendError(f"slot {slot} is not free; close it first")
        self._prompts[slot] = prompt
        decodes = self._encoder is None
        self._place[slot] = len(prompt) - 1 if decodes else 0
        self._next[slot] = prompt[-1] if decodes else self._start

    def prefill(self, slots: Sequence[int]) -> None:
        """Run the prompts of opened slots, through all layers or through the encoder."""
        with _failures(f"the prompts of {len(slots)} sequences"):
            counts = np.array([len(self._prompts[slot]) for slot in slots], np.int64)
            rows, zeros = np.array(slots, np.int64), np.zeros(len(slots), np.int64)
            if self._encoder is not None:
                self._encode(Span(rows, zeros, counts))
                return
            span = Span(rows, zeros, counts - 1).part(np.flatnonzero(counts > 1))
            for _, part in self._alike(span):
                self._prefill(part)

    def run(
        self, stage: int, slots: Sequence[int], limits: Sequence[float] | None = None
    ) -> TokenAnswers:
        """Run a stage for one token of each slot, and for earlier tokens in a catch-up."""
        with _failures(f"stage {stage} on {len(slots)} rows"):
            rows = np.array(slots, np.int64)
            self._check_room(rows)
            starts = self._filled[stage, rows]
            span = Span(rows, starts, self._place[rows] + 1 - starts)
            parts = [(part, self._advance(stage, alike)) for part, alike in self._alike(span)]
            self._run_rows[stage] += len(rows)
            ran = int(span.counts.sum()) if self._catches_up else len(rows)
            self._counts["caught_up"] += ran - len(rows)
            self._counts["layer_tokens"] += ran * len(self.model.layers_of(stage))
            return self._answer(stage, _joined(parts, len(rows)), limits)

    def states_behind(self, stage: int, slots: Sequence[int]) -> NDArray[np.float32]:
        """Return the outputs [n, width] of a stage, except the last, that slots have just run."""
        rows = np.array(slots, np.int64)
        places = self._place[rows] if self._catches_up else 0
        states: NDArray[np.float32] = self._states[stage][rows, places]
        return states

    def leave(self, stage: int, slots: Sequence[int]) -> None:
        """Fill the layers that these tokens skip, unless the model uses catch-up."""
        graph = self._fills[stage]
        if graph is None:
            return
        with _failures(f"propagation after stage {stage} on {len(slots)} rows"):
            rows = np.array(slots, np.int64)
            places = self._place[rows]
            span = Span(rows, places, np.ones_like(rows))
            for _, part in self._alike(span):
                self._fill(graph, stage, part)
            self._filled[stage + 1 :, rows] = places + 1
            self._counts["propagated"] += len(rows)

    def accept(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Set the token of each slot that stage 0 runs next."""
        rows = np.array(slots, np.int64)
        self._next[rows] = np.asarray(tokens)
        self._place[rows] += 1

    def close_slot(self, slot: int) -> None:
        """Release a slot, and clear its filled positions."""
        # A failed step may have written one position more than the filled ones.
        written = int(max(self._filled[:, slot].max(), self._place[slot] + 1))
        self._caches.clear(slot, written)
        self._cross.clear(slot, int(self._source[slot]))
        self._forget_sources([slot])
        for states in self._states:
            states[slot, :written] = 0
        self._source[slot] = 0
        self._filled[:, slot] = 0
        self._place[slot] = _CLOSED
        self._prompts.pop(slot, None)

    def close(self) -> None:
        """Release all graphs and caches; nothing can run afterwards."""
        self._segments, self._adapters, self._fills = [], [], []
        self._heads, self._judges = [], []
        del self._head, self._encoder
        self._release()

    def statistics(self) -> dict[str, Any]:
        """Return counts: tokens prefilled, propagated and caught up, and rows by stage.

        ``padding`` counts positions that padded shorter prompts to the longest one, ``headed``
        counts rows for which a head ran.
        """
        used = int((self._place != _CLOSED).sum())
        held = self._caches.size_bytes + self._cross.size_bytes
        held += sum(states.nbytes for states in self._states)
        return {**self._counts, "stage_rows": list(self._run_rows), "slots_used": used,
                "cache_bytes": held}  # fmt: skip

    # -----------------------------------------------------------------------------------------
    # The longest sequence

    def _most(self, attempt: Callable[[int], None], most: int, *, least: int = 1) -> int:
        """Return the largest number of tokens, up to ``most``, with which ``attempt`` succeeds.

        Exports limit positions in different ways: by a table of positions, rotation angles, or a
        causal mask. All layers have the same limit, so one step of the first stage finds it.
        """
        works, fails = least - 1, most + 1
        while fails - works > 1:
            # Start with few tokens, because caches for ``most`` tokens may be larger than the
            # memory.
            tokens = min(max(least, 2 * works), most) if fails > most else (works + fails) // 2
            try:
                attempt(tokens)
            except BackendError:
                if tokens == least:  # the number of tokens is not the reason
                    raise
                fails = tokens
            else:
                works = tokens
        return works

    def _try_prompt(self, tokens: int) -> None:
        """Run the encoder on a prompt of this number of tokens."""
        with _failures(f"a prompt of {tokens} tokens"):
            self._prompts[0] = np.zeros(tokens, np.int64)
            self._encode(Span(_SLOT_0, np.zeros_like(_SLOT_0), np.array([tokens])))

    def _try_place(self, tokens: int) -> None:
        """Run a token through the first stage, as the last of this number of tokens."""
        with _failures(f"a sequence of {tokens} tokens"):
            span = Span(_SLOT_0, np.array([tokens - 1]), np.ones_like(_SLOT_0))
            self._step(0, span, {IDS: np.zeros((1, 1), np.int64)})

    # -----------------------------------------------------------------------------------------
    # Steps

    def _prefill(self, span: Span) -> None:
        """Run the prompts of a span, without their last tokens, through all stages."""
        longest = int(span.counts.max())
        ids = padded_rows([self._prompts[slot][:-1] for slot in span.slots], longest)
        width = longest if self.model.several else 1
        for start in range(0, longest, width):  # width 1: prompts have one length
            counts = np.minimum(span.counts - start, width)
            now = Span(span.slots, span.starts + start, counts)
            fed: Arrays = {IDS: ids[:, start : start + width]}
            for stage in range(self.stages):
                fed = {STATE: self._step(stage, now, fed)[NEXT_STATE]}
        self._filled[:, span.slots] = span.ends
        self._count_padded(span)

    def _encode(self, span: Span) -> None:
        """Run the encoder, and store the keys and values that layers compute from its output."""
        assert self._encoder is not None, "asked for by encoder-decoders alone"
        for rows in [slice(None)] if MASK in self._encoder.read else _equal_rows(span.counts):
            part = span.part(rows)
            self._source[part.slots] = part.counts
            longest = int(part.counts.max())
            ids = padded_rows([self._prompts[slot] for slot in part.slots], longest)
            new = self._encoder.run({IDS: ids, MASK: _filled_mask(part.counts, longest)})
            self._forget_sources(part.slots.tolist())
            self._cross.write(range(len(self.model.layers)), part, new)
            self._count_padded(part)

    def _advance(self, stage: int, span: Span) -> Arrays:
        """Run a stage up to the token of each slot; return its states [n, 1, width].

        The keys are ``state``, and ``previous_state`` if the exit reads it.
        """
        width = int(span.counts.max())
        for start in range(0, width, 1 if not self.model.several else width):
            now = span
            if not self.model.several:
                now = Span(span.slots, span.starts + start, np.ones_like(span.counts))
            given = self._step(stage, now, self._entering(stage, now))
            self._keep(stage, now, given[NEXT_STATE])
        self._filled[stage, span.slots] = span.ends
        ends = {STATE: given[NEXT_STATE]}
        if PREVIOUS_STATE in given:
            ends[PREVIOUS_STATE] = given[PREVIOUS_STATE]
        if ends[STATE].shape[1] == 1:
            return ends
        places = np.arange(len(now.slots)), now.counts - 1
        return {name: states[places][:, None] for name, states in ends.items()}

    def _entering(self, stage: int, span: Span) -> Arrays:
        """Return the inputs of a stage for a span; a row is padded with its last position."""
        if stage == 0:
            return {IDS: self._next[span.slots][:, None]}
        kept = self._states[stage - 1]
        if not self._catches_up:
            return {STATE: kept[span.slots]}
        return {STATE: kept[span.slots[:, None], _places(span, int(span.counts.max()))]}

    def _keep(self, stage: int, span: Span, states: NDArray[np.float32]) -> None:
        """Keep the inputs of the next stage."""
        if stage == self.stages - 1:
            return
        kept = self._states[stage]
        if not self._catches_up:
            kept[span.slots] = states
            return
        for row, (slot, start, count) in enumerate(zip(*span, strict=True)):
            kept[slot, start : start + count] = states[row, :count]

    def _step(self, stage: int, span: Span, fed: Arrays) -> Arrays:
        """Run the layers of a stage on a span of new positions, and write their caches.

        ``fed`` are tokens or states [n, tokens, ...]; the span has the count of each row. Return
        the outputs of the graph; states of padding are meaningless.
        """
        graph, layers = self._segments[stage], self._layers[stage]
        past, tokens = int(span.starts.max()), next(iter(fed.values())).shape[1]
        feeds = {**fed, **self._caches.read(layers, span.slots, past)}
        if graph.sizes:
            feeds |= self._sizes(graph, span, tokens)
        if self._encoder is not None:
            feeds |= self._source_feeds(stage, span.slots)
        if MASK in graph.read:
            feeds[MASK] = _step_mask(span, past, tokens)
        if POSITIONS in graph.read:
            feeds[POSITIONS] = _places(span, tokens)
        given = graph.run(feeds)
        self._caches.write(layers, span, given)
        return given

    def _source_feeds(self, stage: int, slots: IntArray) -> Arrays:
        """Return the prompts' keys, values and mask; they are copied only if the rows changed."""
        known, rows = self._sources.get(stage), slots.tolist()
        if known is None or known.slots != rows:
            counts = self._source[slots]
            longest = int(counts.max())
            feeds = self._cross.read(self._layers[stage], slots, longest)
            known = _Source(rows, {**feeds, SOURCE_MASK: _filled_mask(counts, longest)})
            self._sources[stage] = known
        return known.feeds

    def _forget_sources(self, slots: Sequence[int]) -> None:
        """Drop the cached inputs of slots whose prompts change."""
        changed, known = set(slots), self._sources.items()
        self._sources = {n: one for n, one in known if changed.isdisjoint(one.slots)}

    def _fill(self, graph: _Graph, stage: int, span: Span) -> None:
        """Compute the keys and values of all later layers from the states of tokens that leave."""
        feeds = self._sizes(graph, span, 1) if graph.sizes else {}
        feeds |= {STATE: self._states[stage][span.slots], POSITIONS: span.starts[:, None]}
        layers = range(self.model.stages[stage].end, len(self.model.layers))
        self._caches.write(layers, span, graph.run(feeds))

    def _answer(self, stage: int, ends: Arrays, limits: Sequence[float] | None) -> TokenAnswers:
        """Run the exit of a stage, or the model's end, on states [n, 1, width]."""
        judge, states = self._judges[stage], ends[STATE]
        if judge is None:
            given = self._read_off(stage, states)
            # NaN counts as confidence 0.
            sure = np.fmax(given[CONFIDENCE], _ZERO)
            if stage == self.stages - 1:
                sure = np.ones_like(sure)
            return TokenAnswers(given[ANSWER], sure)
        sure = np.fmax(judge.run(ends)[CONFIDENCE], _ZERO)
        leaving = np.flatnonzero(sure >= np.asarray(0.0 if limits is None else limits))
        tokens = np.full(len(sure), NO_TOKEN)
        if leaving.size:
            tokens[leaving] = self._read_off(stage, states[leaving])[ANSWER]
        return TokenAnswers(tokens, sure)

    def _read_off(self, stage: int, states: NDArray[np.float32]) -> Arrays:
        """Run the head of an exit on its states, or the shared head on the adapted states."""
        self._counts["headed"] += len(states)
        head, adapter = self._heads[stage], self._adapters[stage]
        if head is not None:
            return head.run({STATE: states})
        if adapter is not None:
            states = adapter.run({STATE: states})[NEXT_STATE]
        return self._head.run({STATE: states})

    def _alike(self, span: Span) -> Iterator[tuple[NDArray[np.intp] | slice, Span]]:
        """Yield rows that may share a step, and their span: all rows, or rows of equal length."""
        if not len(span.slots):
            return
        keys = [] if self.ragged else [span.starts]
        keys += [] if self.ragged and self.model.several else [span.counts]
        for rows in _equal_rows(*keys):
            yield rows, span if isinstance(rows, slice) else span.part(rows)

    def _sizes(self, graph: _Graph, span: Span, tokens: int) -> Arrays:
        """Return the sizes that a graph reads from additional inputs."""
        past, source = int(span.starts.max()), int(self._source[span.slots].max())
        sizes = {"tokens": tokens, "past": past, "source": source}
        return {size_name(name): np.array([sizes[name]]) for name in graph.sizes}

    def _count_padded(self, span: Span) -> None:
        self._counts["prefilled"] += int(span.counts.sum())
        self._counts["padding"] += int((span.counts.max() - span.counts).sum())

    def _check_room(self, rows: IntArray) -> None:
        places = self._place[rows].tolist()
        wrong = [n for n, place in enumerate(places) if not 0 <= place < self.length]
        if wrong:
            slot, place = int(rows[wrong[0]]), places[wrong[0]]
            raise BackendError(
                f"the token of slot {slot} is at place {place}, expected 0 to "
                f"{self.length - 1}: end sequences in full slots, and run opened slots"
            )


def _equal_rows(*keys: IntArray) -> Iterator[NDArray[np.intp] | slice]:
    """Yield the rows of each group with equal keys; all rows if there is no key."""
    if all((key == key[0]).all() for key in keys):
        yield slice(None)
        return
    _, group = np.unique(np.stack(keys), axis=1, return_inverse=True)
    for number in range(int(group.max()) + 1):
        yield np.flatnonzero(group == number)


def _places(span: Span, tokens: int) -> IntArray:
    """Return int64 [n, tokens]: positions of a span, padded with each row's last position."""
    offsets = np.minimum(np.arange(tokens), span.counts[:, None] - 1)
    return span.starts[:, None] + offsets


def _filled_mask(counts: IntArray, width: int) -> IntArray:
    """Return int64 [n, width]: 1 in the first ``counts`` columns of each row, then 0."""
    return (np.arange(width) < counts[:, None]).astype(np.int64)


def _step_mask(span: Span, past: int, tokens: int) -> IntArray:
    """Return int64 [n, past + tokens]: 1 for filled and for new positions."""
    mask = np.ones((len(span.slots), past + tokens), np.int64)
    np.less(np.arange(past), span.starts[:, None], out=mask[:, :past])
    if tokens > 1:
        np.less(np.arange(tokens), span.counts[:, None], out=mask[:, past:])
    return mask


def _joined(parts: Sequence[tuple[NDArray[np.intp] | slice, Arrays]], rows: int) -> Arrays:
    """Join the results of separate runs, with rows in the original order."""
    if len(parts) == 1:
        return parts[0][1]
    joined = {k: np.empty((rows, *v.shape[1:]), v.dtype) for k, v in parts[0][1].items()}
    for part, arrays in parts:
        for name, array in arrays.items():
            joined[name][part] = array
    return joined


def _present(graph: _Graph | None) -> _Graph:
    assert graph is not None, "a manifest names the graphs of layers and head"
    return graph


@contextmanager
def _failures(what: str) -> Iterator[None]:
    """Raise any error of a runtime as a BackendError that names the failed work."""
    try:
        yield
    except BackendError:
        raise
    except Exception as error:  # ONNX Runtime's own classes derive from Exception only
        reason = " ".join(str(error).split())
        raise BackendError(f"{what} failed: {reason}") from error
