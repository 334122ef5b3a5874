"""Trial of a variant: it is read, cut and verified, gets exits, and samples leave at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.certify.decision import MODEL_END
from offramp.compiler.common.errors import CompileError
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.common.rounding import rounding_of
from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.cuts.slicing import Sliced, slice_model, verify
from offramp.compiler.frontend.model import read_model
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import make_plan
from offramp.tools.gpu.staged import bundle_of
from tests.zoo.exits import (
    Arrays,
    Departures,
    RandomExit,
    draw_policy,
    give_exits,
    heads_of,
    subset,
)
from tests.zoo.variants import Exported, Variant, export

SMALL_BATCH = 7
POLICIES = 2
"""Policies that are tried: one with all exits, others with some."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a variant's trial."""

    variant: Variant
    cuts: int = 0
    first: float = 0.0
    """Share of the work before the first cut."""
    last: float = 0.0
    worst: float = 0.0
    """Largest difference, relative to the largest value of what should be answered: of chained
    segments from the model, of samples that leave from their exits, of others from the file."""
    left: int = 0
    """Samples that left at some exit, in all runs."""
    ended: int = 0
    """Samples that ran to the end there."""
    heads: str = ""
    form: str = ""
    remark: str = ""
    """Reason of a refusal, or the defect."""

    @property
    def verified(self) -> bool:
        return not self.remark


class TrialError(Exception):
    """A sample gets a wrong answer, or the file cannot be run."""


def examine(variant: Variant, folder: Path) -> Outcome:
    """Export, read (which compares rows alone, together and with the original), cut and verify;
    then give it exits, and let samples leave."""
    given = export(variant, folder)
    try:
        wanted = [original_answers(given, inputs) for inputs in given.inputs]
        pieces = sliced(given.path)
        outcome = _described(variant, pieces)
        for number, (inputs, answers) in enumerate(zip(given.inputs, wanted, strict=True)):
            outcome = _tried(outcome, pieces, inputs, answers, folder / f"{number}")
    except (CompileError, TrialError) as error:
        return Outcome(variant, remark=str(error).removeprefix(f"{given.path}: "))
    return outcome


def sliced(path: Path) -> Sliced:
    """Read a file, and cut it at twelve places at most."""
    return slice_model(read_model(path), CompileOptions.of(model=path, data=path, output=path))


def _described(variant: Variant, pieces: Sliced) -> Outcome:
    shares = [cut.flops_share_before for cut in find_cuts(pieces.model).cuts]
    return Outcome(
        variant,
        cuts=len(shares),
        first=min(shares),
        last=max(shares),
        form=pieces.model.answer.form,
    )


def _tried(
    outcome: Outcome,
    pieces: Sliced,
    inputs: Arrays,
    wanted: NDArray[np.float64],
    folder: Path,
) -> Outcome:
    """Verify the pieces, and have samples leave, on some inputs."""
    model = pieces.model
    rounding = rounding_of(model.proto)
    rows = len(next(iter(inputs.values())))
    sizes = sorted({1, min(SMALL_BATCH, rows - 1), rows})
    chained = verify(model, pieces.segments, inputs, tolerance=rounding.chained, batch_sizes=sizes)
    rng = np.random.default_rng(0)
    exits = give_exits(pieces, inputs, rng)
    outcome = replace(outcome, heads=heads_of(exits), worst=max(outcome.worst, chained))
    for number in range(POLICIES):
        used = exits if number == 0 else subset(exits, rng)
        drawn = draw_policy(used, rng)
        folder.mkdir(exist_ok=True)
        bundle = bundle_with(pieces, exits, drawn, inputs, folder / f"{number}.ee")
        found, worst = _left(bundle, exits, drawn, wanted, inputs, sizes, rounding.batches)
        outcome = replace(
            outcome,
            worst=max(outcome.worst, worst),
            left=outcome.left + int((found != MODEL_END).sum()),
            ended=outcome.ended + int((found == MODEL_END).sum()),
        )
    return outcome


def bundle_with(
    pieces: Sliced, exits: Sequence[RandomExit], drawn: Departures, inputs: Arrays, path: Path
) -> Bundle:
    """Write a bundle of all exits, with a policy of some."""
    graphs = {made.exit: made.graph for made in exits}
    return bundle_of(pieces, path, inputs, exits=graphs, active=drawn.active)


def original_answers(given: Exported, inputs: Arrays) -> NDArray[np.float64]:
    """Return the file's own answers in ONNX Runtime, operator by operator: [n, classes].

    Optimisations are off, since ONNX Runtime 1.30 and 1.31 crash with them in half precision.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(str(given.path), options)
    except Exception as error:  # ONNX Runtime's own classes derive from Exception only
        raise TrialError(f"ONNX Runtime itself refuses the file: {error}") from error
    rows = len(next(iter(inputs.values())))
    names = [tensor.name for tensor in session.get_inputs()]
    size = given.batch or rows
    answers = []
    for start in range(0, rows, size):
        fed = {name: inputs[name][start : start + size] for name in names}
        answers.append(session.run(None, fed)[0])
    joined = np.concatenate(answers).astype(np.float64)
    return joined.reshape(rows, -1)


def right_answers(
    exits: Sequence[RandomExit], wanted: NDArray[np.float64]
) -> dict[int, NDArray[np.float64]]:
    """Return the right answers at each exit, and at the model's end: [n, classes]."""
    answers = {made.exit.index: made.answer.astype(np.float64) for made in exits}
    return answers | {MODEL_END: wanted}


def _left(
    bundle: Bundle,
    exits: Sequence[RandomExit],
    drawn: Departures,
    wanted: NDArray[np.float64],
    inputs: Arrays,
    sizes: Sequence[int],
    allowed: float,
) -> tuple[NDArray[np.int64], float]:
    """Run batches through the bundle's stages; give where samples left, and the worst error."""
    pipeline = Pipeline(OnnxRuntimeBackend(), make_plan(bundle))
    answers = right_answers(exits, wanted)
    places: list[NDArray[np.int64]] = []
    worst = 0.0
    for size in reversed(sizes):
        chosen = np.arange(len(wanted))[-size:]
        fed = {name: array[chosen] for name, array in inputs.items()}
        found = np.full(size, MODEL_END - 1, np.int64)
        for departure in pipeline.run(pipeline.backend.open_slot(), fed):
            place = pipeline.plan.stages[departure.stage].answered_by
            found[departure.rows] = place
            right = answers[place]
            error = np.abs(departure.answer - right[chosen[departure.rows]]).max()
            relative = float(error) / (float(np.abs(right).max()) or 1.0)
            if not relative <= allowed:
                raise TrialError(
                    f"of a batch of {size}, samples that leave at {place} are answered otherwise, "
                    f"by {relative:.1e} of the largest value"
                )
            worst = max(worst, relative)
        for row, place in zip(chosen.tolist(), found.tolist(), strict=True):
            if not drawn.allows(row, place, allowed):
                raise TrialError(
                    f"of a batch of {size}, sample {row} leaves at {place}, and should at "
                    f"{drawn.exits[row]}"
                )
        places.append(found)
    return np.concatenate(places), worst
