"""Training of the exits, and their predictions on recorded answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray

from offramp.bundle import NEVER
from offramp.compiler.common.progress import Advance
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.generation.bundle.tensor_names import ANSWER, CONFIDENCE, NEXT_STATE, STATE
from offramp.generation.bundle.text_model import TextCriterion
from offramp.generation.compiling.exit_states import ExitStates, States
from offramp.generation.compiling.prompts import Tokens
from offramp.generation.compiling.text_options import TextCompileOptions
from offramp.generation.graphs.decoder_cut import DecoderCut
from offramp.generation.graphs.text_graphs import TextExit, TextExport, head_graph, logits_graph
from offramp.generation.promise.text_records import TextRecords
from offramp.generation.training.exit_samples import ExitTraining

_AT_ONCE: Final = 4096
"""Number of tokens in one run of a head."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExitParts:
    """Graphs that belong to one exit."""

    adapter: onnx.ModelProto | None = None
    head: onnx.ModelProto | None = None
    judge: onnx.ModelProto | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedExits:
    """Exits to choose from, and the head shared by all exits without a head of their own."""

    exits: Sequence[ExitParts]
    head: onnx.ModelProto

    def exit(self, number: int, layer: int) -> TextExit:
        """Return an exit after a layer, with a threshold that switches it off."""
        own = self.exits[number]
        return TextExit(
            layer=layer, threshold=NEVER, adapter=own.adapter, head=own.head, judge=own.judge
        )

    def records(self, seen: ExitStates, criterion: TextCriterion) -> TextRecords:
        """Return the predictions of every exit at the recorded tokens."""
        answers, confidences = [], []
        for number, own in enumerate(self.exits):
            answer, sure = _said(seen.states[number], own, self.head)
            if criterion == "state similarity":
                sure = seen.confidences[number]
            answers.append(answer)
            confidences.append(sure)
        return TextRecords(
            starts=seen.starts,
            confidences=np.fmax(np.array(confidences, np.float32), 0),
            agrees=np.array(answers) == seen.tokens,
        )


def train_exits(
    export: TextExport,
    train: ExitStates,
    tune: ExitStates,
    options: TextCompileOptions,
    advance: Advance,
) -> TrainedExits:
    """Train the parts that ``options`` request, at every exit."""
    cut = DecoderCut(export.decoder)
    head = head_graph(cut, options.criterion)
    made = []
    for number in range(len(train.states)):
        made.append(_train_exit(cut, number, train, tune, options))
        advance(1)
    return TrainedExits(exits=made, head=head)


def _train_exit(
    cut: DecoderCut, number: int, train: ExitStates, tune: ExitStates, options: TextCompileOptions
) -> ExitParts:
    from offramp.generation.training import adapters, judges, small_heads  # noqa: PLC0415 - torch

    how = ExitTraining(seed=options.seed)
    seen, tuning = train.samples(number), tune.samples(number)
    parts, logits = ExitParts(), logits_graph(cut)
    if options.head != "full":
        assert options.head_size is not None
        size = {"tokens" if options.head == "subset" else "rank": options.head_size}
        criterion = options.criterion
        made = small_heads.train_small_head(
            seen, tuning, logits, criterion=criterion, options=how, **size
        )
        parts = ExitParts(head=made.graph)
    elif options.train == "adapters":
        learned = adapters.train_adapter(seen, tuning, logits, options=how)
        if learned.after.loss < learned.before.loss:
            parts = ExitParts(adapter=learned.graph)
    if options.criterion != "learned classifier":
        return parts
    shared = head_graph(cut, "max probability")
    said = [_said(states.states, parts, shared)[0] == states.tokens for states in (seen, tuning)]
    judge = judges.train_judge(seen, tuning, agrees=said[0], tuning_agrees=said[1], options=how)
    return replace(parts, judge=judge.graph)


def train_together(
    export: TextExport,
    prompts: Sequence[Tokens],
    answers: Sequence[Sequence[int]],
    layers: Sequence[int],
    options: TextCompileOptions,
    *,
    start_token: int | None,
    advance: Advance,
) -> TextExport:
    """Train a copy of the decoder with exits after ``layers``, for up to ``options.minutes``."""
    from offramp.generation.training import joint_text  # noqa: PLC0415 - torch

    done = 0

    def progress(share: float) -> None:
        nonlocal done
        advance(round(100 * share) - done)
        done = round(100 * share)

    made = joint_text.train_joint_text(
        export,
        prompts,
        [np.array(answer, np.int64) for answer in answers],
        exits=layers,
        start_token=start_token,
        options=joint_text.JointTextTraining(minutes=options.minutes, seed=options.seed),
        progress=progress,
    )
    return made.export


def _said(
    states: States, own: ExitParts, shared: onnx.ModelProto
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Run an exit on states [tokens, width]; return tokens int64[tokens] and their confidences."""
    adapter = None if own.adapter is None or own.head is not None else GraphRunner(own.adapter)
    head = GraphRunner(own.head or shared)
    judge = None if own.judge is None else GraphRunner(own.judge)
    answers, confidences = [], []
    for start in range(0, len(states), _AT_ONCE):
        state = states[start : start + _AT_ONCE, None]
        given = head.run(
            {STATE: state if adapter is None else adapter.run({STATE: state})[NEXT_STATE]}
        )
        answers.append(given[ANSWER])
        sure = given[CONFIDENCE] if judge is None else judge.run({STATE: state})[CONFIDENCE]
        confidences.append(sure)
    return np.concatenate(answers), np.concatenate(confidences)
