"""Published early-exit methods on a bundle's own exits, compared by ``eebench compare``.

    python -m benchmarks.methods BUNDLE --data TEST --method branchynet,deebert,pabee [--json FILE]

A method is a criterion and a rule for its thresholds. Backbone, heads, data and rounds are the
bundle's, so only the decision to leave differs:

* BranchyNet (Algorithm 1): the entropy of the answer, a threshold for each exit;
* DeeBERT (3.2): the entropy, one threshold for all exits;
* PABEE (3.3): a number of consecutive exits with the same class, one number for all.

Among the thresholds that keep the bundle's bound on the tuning samples, those with the largest
predicted savings are taken: nothing is promised for other samples. All methods tune on the split
that tuned the bundle's own thresholds, if available. The bundle's records of it have classes and
one confidence for each exit, which determines the entropy for two classes; otherwise the data that
the bundle was compiled with must be present. Without it the first samples of the data tune
entropies, and are not measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.baselines.thresholds import search_thresholds
from offramp.bundle import NEVER, ActiveExit, Bundle, ExitPolicy
from offramp.bundle.records import TUNE
from offramp.bundle.schema.answers import PATIENCE, Criterion
from offramp.calibration.choose.exit_records import ExitRecords, record_answers
from offramp.calibration.data.dataset import Dataset, read_samples
from offramp.certify import FloatArray, Records, evaluate
from offramp.certify.binomial import count_allowed
from offramp.certify.path import best_common_thresholds
from offramp.commands.combinations import Illegal
from offramp.commands.parser import LayeredParser
from offramp.compiler.data.data_flags import source_of
from offramp.compiler.engines.engine_verification import part_data
from offramp.compiler.exits.endings import with_certainty
from offramp.engine.answers.criteria import State, patience_of_classes
from offramp.engine.control.costs import CostModel
from offramp.engine.models.controllers import MAX_DISAGREEMENT
from offramp.engine.stages.answering_graphs import answering_graphs
from offramp.engine.stages.plan import Plan, StageSpec, make_plan
from offramp.tools.bench import compare_command
from offramp.tools.bench.cli import add_own_code, run_command
from offramp.tools.bench.common.bench_flags import look_up
from offramp.tools.bench.compare_command import AdditionalPlans, add_arguments

TUNING_SHARE: Final = 0.25
"""Share of the data for tuning, if records are not enough."""
MOST_TUNING: Final = 1000
_LEAST_TUNING: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A criterion, and how its thresholds are found."""

    criterion: Criterion
    search: Callable[[Records, int], FloatArray]
    """Function from the exits' records of the tuning samples and the allowed number of errors to a
    threshold for each exit."""


ENTROPY: Final = Criterion(name="entropy")
METHODS: Final[Mapping[str, Method]] = {
    "branchynet": Method(criterion=ENTROPY, search=search_thresholds),
    "deebert": Method(criterion=ENTROPY, search=best_common_thresholds),
    "pabee": Method(
        criterion=Criterion(name=PATIENCE, depends_on_earlier=True), search=best_common_thresholds
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedMethod:
    """A method with its thresholds on a bundle, ready to be measured."""

    name: str
    plan: Plan
    thresholds: tuple[float, ...]
    """Thresholds of all exits of the bundle, as confidences."""
    tuned_on: str
    """Description of the tuning samples, and their number."""
    disagreement: float
    """Share of the tuning samples whose answer differs from the model's."""
    predicted_savings: float
    """Predicted savings on these samples, at the bundle's reference batch size."""

    def describe(self) -> str:
        """Return the tuned thresholds, for the table's footnote."""
        used = [f"exit {i} ≥ {t:.4g}" for i, t in enumerate(self.thresholds) if t < NEVER]
        return (
            f"{self.name}: {', '.join(used) or 'no exit pays within the bound'}; tuned on "
            f"{self.tuned_on}, {self.disagreement:.2%} unlike the model there"
        )


def parse_methods(texts: Sequence[str]) -> tuple[str, ...]:
    """Read names, separated by commas or given one by one; ValueError for one that is unknown."""
    names = [name.strip() for text in texts for name in text.split(",")]
    return tuple(look_up("method", dict.fromkeys(names), METHODS))


def tune_methods(
    names: Sequence[str],
    bundle: Bundle,
    dataset: Dataset,
    *,
    threads: int,
    compiled_with: Dataset | None = None,
    seed: int = 0,
) -> tuple[list[TunedMethod], Dataset]:
    """Find the thresholds of methods; return them, and the remaining data to measure.

    ``compiled_with`` is the data that the bundle was compiled with, by this ``seed``. Raise
    ValueError if it is other data, if the bundle is not a classifier or has no exits, or if the
    data are too few.
    """
    manifest = bundle.manifest
    if not names:
        return [], dataset
    asked = f"--method {','.join(names)}"
    if manifest.answer.task.kind != "classification":
        raise ValueError(
            f"{asked}: entropy and patience are of classes; the bundle's task is "
            f"{manifest.answer.task.kind}"
        )
    if manifest.answer.form == "values":
        raise ValueError(
            f"{asked}: the bundle's answers are on a scale of the model's own (they end with "
            f"{', '.join(manifest.answer.tail)}), which no entropy can be read off"
        )
    if not manifest.exits:
        raise ValueError(f"{asked}: the bundle has no exits")
    kept = ExitRecords.kept_by(bundle, TUNE)
    found = {PATIENCE: _Tuning(_patient(kept), _RECORDS.format(len(kept.final_prediction)))}
    if any(METHODS[name].criterion == ENTROPY for name in names):
        entropies = _kept_entropies(bundle, kept)
        if entropies is None and compiled_with is not None:
            split = _tuning_split(bundle, compiled_with, seed, threads)
            records = _recorded(bundle, split, ENTROPY, threads)
            entropies = _Tuning(records, _SPLIT.format(len(split)))
        if entropies is None:
            entropies, dataset = _held_back(asked, bundle, dataset, threads)
        found[ENTROPY.name] = entropies
    return [_tune(name, bundle, *found[METHODS[name].criterion.name]) for name in names], dataset


class _Tuning(NamedTuple):
    """Tuning data of the methods of a criterion."""

    records: ExitRecords
    tuned_on: str
    """Description of the tuning samples, for the footnote."""


_RECORDS: Final = "the bundle's {} tuning records"
_SPLIT: Final = "the {} samples that the bundle was tuned on"


def _kept_entropies(bundle: Bundle, kept: ExitRecords) -> _Tuning | None:
    """Compute entropies from the bundle's records; ``None`` if the records do not suffice.

    For two classes the entropy follows from the largest probability, and also from the difference
    of the two probabilities.
    """
    answer = bundle.manifest.answer
    confidence = kept.confidence.astype(np.float64)
    match answer.criterion.name:
        case ENTROPY.name:
            certainty = confidence
        case "probability" if answer.classes == 2:
            certainty = _certainty_of_two(confidence)
        case "margin" if answer.classes == 2:
            certainty = _certainty_of_two((1 + confidence) / 2)
        case _:
            return None
    records = replace(kept, confidence=certainty.astype(np.float32))
    return _Tuning(records, _RECORDS.format(len(kept.final_prediction)))


def _certainty_of_two(largest: FloatArray) -> FloatArray:
    """Return 1 - entropy / log 2, from the larger of two probabilities; 0 without confidence."""
    p = np.clip(largest, 0.5, 1)
    other = np.maximum(1 - p, np.finfo(np.float64).tiny)
    found: FloatArray = 1 + (p * np.log2(p) + other * np.log2(other))
    return found


def _tuning_split(bundle: Bundle, dataset: Dataset, seed: int, threads: int) -> Dataset:
    """Return the samples that the bundle was tuned on; ValueError if the data lack them."""
    parts = part_data(bundle, dataset, seed=seed, threads=threads)
    if not parts.certifies:
        raise ValueError(
            "--method-data: these are not the data that the bundle was compiled with, or it was "
            f"compiled with another --seed than {seed} (--method-seed); give the right data and "
            "seed, or leave --method-data out: then a part of --data tunes"
        )
    return parts.tune


def _held_back(
    asked: str, bundle: Bundle, dataset: Dataset, threads: int
) -> tuple[_Tuning, Dataset]:
    """Record entropies of the first samples; also return the others, which may be measured."""
    count = min(int(TUNING_SHARE * len(dataset)), MOST_TUNING)
    if count < _LEAST_TUNING:
        criterion = bundle.manifest.answer.criterion.name
        least = round(_LEAST_TUNING / TUNING_SHARE)
        raise ValueError(
            f"{asked}: the bundle's records hold no entropies (--criterion {criterion}), so a "
            f"quarter of the data tunes, which is {count} samples; give at least {least}, or give "
            "the data that the bundle was compiled with as --method-data"
        )
    records = _recorded(bundle, dataset.subset(np.arange(count)), ENTROPY, threads)
    told = f"the first {count} samples of the data, which are not measured"
    return _Tuning(records, told), dataset.subset(np.arange(count, len(dataset)))


def _tune(name: str, bundle: Bundle, records: ExitRecords, tuned_on: str) -> TunedMethod:
    method, manifest = METHODS[name], bundle.manifest
    promise = bundle.policy.promise
    bound = MAX_DISAGREEMENT if promise is None else promise.max_disagreement
    costs = CostModel.of(manifest, bundle.profile(), manifest.calibration.reference_batch_size)
    latency_ms = costs.latency_ms(list(range(costs.exits)))
    data = Records.of(records.confidence, records.agrees, latency_ms)
    thresholds = method.search(data, count_allowed(bound, data.samples))
    outcome = evaluate(
        data.confidence, data.agrees, latency_ms, thresholds, vanilla_ms=costs.source_ms
    )
    if outcome.savings <= 0:  # exits cost more than they save: it is better served without
        thresholds = np.full_like(thresholds, NEVER)
    leaving = thresholds < NEVER
    return TunedMethod(
        name=name,
        plan=_plan(bundle, method.criterion, thresholds),
        thresholds=tuple(thresholds.tolist()),
        tuned_on=tuned_on,
        disagreement=float(outcome.disagreement) if leaving.any() else 0.0,
        predicted_savings=float(outcome.savings) if leaving.any() else 0.0,
    )


def _plan(bundle: Bundle, criterion: Criterion, thresholds: FloatArray) -> Plan:
    """Plan stages that decide by a criterion, independent of the bundle's own."""
    active = tuple(
        ActiveExit(exit=index, threshold=threshold)
        for index, threshold in enumerate(thresholds.tolist())
        if threshold < NEVER
    )
    answer = replace(bundle.manifest.answer, criterion=criterion)
    judged = replace(bundle, manifest=replace(bundle.manifest, answer=answer))
    plan = make_plan(judged, ExitPolicy(version=1, active=active))
    if criterion.on_host or criterion == bundle.manifest.answer.criterion:
        return plan
    return replace(plan, stages=tuple(_in_graph(criterion, bundle, spec) for spec in plan.stages))


def _in_graph(criterion: Criterion, bundle: Bundle, spec: StageSpec) -> StageSpec:
    if spec.final:
        return spec
    return replace(spec, load=partial(_with_certainty, spec, bundle, criterion.name))


def _with_certainty(spec: StageSpec, bundle: Bundle, criterion: str) -> bytes:
    """Return the stage's graph, which computes a criterion in place of the bundle's own."""
    assert spec.answer is not None
    assert spec.confidence is not None
    manifest = bundle.manifest
    exits = {spec.answer: spec.confidence}
    return with_certainty(spec.load(), exits, manifest.answer, manifest.outputs[0].dtype, criterion)


def _recorded(bundle: Bundle, dataset: Dataset, criterion: Criterion, threads: int) -> ExitRecords:
    """Answer samples at every exit, with a criterion that graphs compute."""
    manifest = bundle.manifest
    exits = {e.output: e.confidence for e in manifest.exits}
    front, *behind = answering_graphs(manifest, bundle.read)
    dtype = manifest.outputs[0].dtype
    front = with_certainty(front, exits, manifest.answer, dtype, criterion.name)
    answer = replace(manifest.answer, criterion=criterion)
    graphs = (front, *behind)
    return record_answers(graphs, list(exits.items()), answer, dataset, threads=threads)


def _patient(records: ExitRecords) -> ExitRecords:
    """Return records with the patience of recorded classes as confidence."""
    confidence: NDArray[np.float32] = np.empty_like(records.confidence)
    state: State = {}
    for place, classes in enumerate(records.prediction):
        confidence[place], state = patience_of_classes(classes, state)
    return replace(records, confidence=confidence)


ILLEGAL: Final = (
    Illegal(
        option="--method-seed",
        without="--method-data",
        why="it says how those data were split; leave it out, or add --method-data",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare a bundle with published methods; return the exit status."""
    return run_command(make_parser(), argv)


def make_parser() -> LayeredParser:
    """Make the parser of the command line."""
    parser = LayeredParser(
        prog="python -m benchmarks.methods",
        description="Measure published methods on a bundle's own exits, in the same rounds as the "
        "bundle and its source model.",
        illegal=ILLEGAL,
    )
    add_arguments(parser)
    add = parser.add_argument_group("methods").add_argument
    add(
        "--method",
        action="append",
        required=True,
        metavar="NAME,…",
        help="branchynet (entropy, a threshold for each exit), deebert (entropy, one threshold), "
        "pabee (exits in a row that agree); may be repeated",
    )
    add(
        "--method-data",
        metavar="DATA",
        help="data that the bundle was compiled with: branchynet and deebert are tuned on the "
        "samples that the bundle was tuned on, and all of --data is measured",
    )
    add("--method-seed", type=int, default=0, metavar="K", help="--seed of that compilation")
    parser.set_defaults(run=run)
    add_own_code(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Tune, compare, and print the report; return the exit status."""
    named = parse_methods(options.method)

    def tuned(bundle: Bundle, dataset: Dataset) -> AdditionalPlans:
        compiled_with = None
        if options.method_data is not None:
            compiled_with = read_samples(source_of(options.method_data, options), bundle.manifest)
        methods, measured = tune_methods(
            named,
            bundle,
            dataset,
            threads=options.threads,
            compiled_with=compiled_with,
            seed=options.method_seed,
        )
        promise = f"{', '.join(named)}: no certificate; what holds holds of what tuned them."
        return AdditionalPlans(
            measured,
            plans={method.name: method.plan for method in methods},
            facts={method.name: _described(method) for method in methods},
            notes=[*(method.describe() for method in methods), promise],
        )

    return compare_command.run(options, tuned)


def _described(method: TunedMethod) -> dict[str, object]:
    """Describe how a method was tuned, for the JSON document."""
    return {
        "thresholds": method.thresholds,
        "tuned_on": method.tuned_on,
        "disagreement_there": method.disagreement,
        "predicted_savings_there": method.predicted_savings,
    }


if __name__ == "__main__":
    sys.exit(main())
