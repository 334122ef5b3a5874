"""The subnets of a supernet that become variants of a bundle: search, measurement, cutting.

SuperServe (4.1, 6.1) profiles subnets on the Pareto front of accuracy and latency. Here, too, each
subnet is timed in alternation with the full model and compared with it on the tuning split, and a
few subnets on the front are kept (:mod:`~offramp.supernet.graphs.search`).
:mod:`~offramp.compiler.blueprints.variants` writes them to the bundle.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from offramp.calibration.data.dataset import Dataset
from offramp.calibration.data.running import run_over
from offramp.calibration.measure.estimates import widest_ratio
from offramp.calibration.measure.profiling import TimedGraph
from offramp.compiler.blueprints.blueprint import Blueprint
from offramp.compiler.blueprints.variants import DrawnVariant, draw_variant
from offramp.compiler.common.errors import CompileError
from offramp.compiler.exits.timed_model import CompileRun
from offramp.compiler.graphs.graph import serialised
from offramp.compiler.graphs.source_model import SourceModel
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.common.environment import available_cores
from offramp.engine.common.timing import Effort, time_rounds
from offramp.supernet.combinations import COMBINATIONS
from offramp.supernet.graphs import (
    RatedChoice,
    Subnet,
    SubnetChoice,
    Supernet,
    laid_out,
    prune,
    read_spec,
    search,
)
from offramp.supernet.graphs.elastic_spec import NONE
from offramp.supernet.graphs.extract import extract_subnet
from offramp.supernet.graphs.norm import SubnetNorm

_log = logging.getLogger(__name__)

BUDGET: Final = 64
"""Largest number of subnets that are measured."""
NORM_SAMPLES: Final = 2048
"""Number of training samples for the statistics of subnets."""
JUDGED_SAMPLES: Final = 1000
"""Number of tuning samples on which each subnet is compared with the full model."""
_EFFORT: Final = Effort(least=6, most=24, seconds=0.5)


@dataclass(frozen=True, slots=True)
class ElasticSource:
    """TOML specification of a model's elastic parts: :class:`.VariantSource`."""

    path: Path
    flag = "--elastic"
    combinations = COMBINATIONS

    def prepare(self, model: SourceModel) -> FoundSupernet:
        """Read the file; errors as for :func:`read_elastic`."""
        return FoundSupernet(read_elastic(self.path, model))


@dataclass(frozen=True, slots=True)
class FoundSupernet:
    """A supernet whose subnets become variants; implements :class:`.VariantFinder`."""

    supernet: Supernet

    @property
    def model(self) -> SourceModel:
        """The model, with its weights stored such that subnets share them."""
        return self.supernet.model

    def find(self, plain: Blueprint, run: CompileRun) -> tuple[DrawnVariant, ...]:
        """Return the useful subnets; see :func:`find_variants`."""
        return find_variants(self.supernet, plain, run)


def read_elastic(path: Path, model: SourceModel) -> Supernet:
    """Read the elastic parts of a model, and store its weights so that subnets share them.

    Raises:
        ElasticSpecError: The file is malformed, or names parts that the graph does not have.
        NotElasticError: The graph cannot be reduced where the file requests it.
        CompileError: The model has dense answers (several per sample).
    """
    if model.answer.task.is_dense:
        raise CompileError(
            f"--elastic needs one answer a sample, not {model.answer.task.kind}; omit it"
        )
    return laid_out(Supernet.of(model, read_spec(path)))


def find_variants(
    supernet: Supernet, plain: Blueprint, run: CompileRun
) -> tuple[DrawnVariant, ...]:
    """Choose the useful subnets, the largest first, and find exits for each.

    ``plain`` is the full model with its exits. Errors are those of :func:`.variants.draw_variant`.
    """
    spec, parts = supernet.spec, run.parts
    norm = None
    if spec.norm_layers != NONE:
        samples = parts.train.subset(np.arange(min(len(parts.train), NORM_SAMPLES)))
        norm = SubnetNorm.of(supernet, samples, threads=available_cores())
    rating = _Rating(supernet, norm, plain, run)
    with run.progress.step("Measure subnets", min(spec.count, BUDGET)) as advance:

        def rate(choice: SubnetChoice) -> RatedChoice:
            rated = rating.rate(choice)
            advance(1)
            return rated

        rated = search(spec, rate, budget=BUDGET, seed=run.options.seed)
    kept = [r for r in prune(rated, spec.full, spec.keep) if r.choice != spec.full]
    if not kept:
        _log.warning(
            "NO SUBNET IS USEFUL, the bundle will have only the full model: each of the %d "
            "subnets takes at least as long as another that agrees more often.",
            len(rated) - 1,
        )
    variants = []
    for chosen in reversed(kept):
        subnet = extract_subnet(supernet, chosen.choice, norm)
        _log.info(
            "%s: %.0f %% of the full model's time, agrees in %.1f %%; %s of its weights are the "
            "full model's.",
            subnet.description,
            100 * chosen.cost,
            100 * chosen.agreement,
            _share(subnet),
        )
        variants.append(draw_variant(subnet.description, subnet.proto, plain, run))
    return tuple(variants)


def _share(subnet: Subnet) -> str:
    whole = subnet.shared_bytes + subnet.own_bytes
    return f"{subnet.shared_bytes / whole:.0%}" if whole else "none"


class _Rating:
    """Measures subnets in comparison with the full model."""

    def __init__(
        self, supernet: Supernet, norm: SubnetNorm | None, plain: Blueprint, run: CompileRun
    ) -> None:
        self._supernet, self._norm = supernet, norm
        options, tune = run.options, run.parts.tune
        self._threads = options.threads
        self._judged = tune.subset(np.arange(min(len(tune), JUDGED_SAMPLES)))
        self._answer = plain.sliced.model.answer
        self._ends = plain.tune.final_prediction[: len(self._judged)]
        self._rows = run.parts.train.take(
            np.arange(options.choice.reference_batch_size) % len(run.parts.train)
        )
        self._full = TimedGraph(serialised(supernet.model.proto), options.threads)

    def rate(self, choice: SubnetChoice) -> RatedChoice:
        """Time a subnet in alternation with the full model, and measure their agreement."""
        if choice == self._supernet.spec.full:
            return RatedChoice(choice=choice, cost=1.0, agreement=1.0)
        graph = serialised(extract_subnet(self._supernet, choice, self._norm).proto)
        subnet = TimedGraph(graph, self._threads)
        timers = [partial(self._full.time_ms, self._rows), partial(subnet.time_ms, self._rows)]
        timed = time_rounds([timers], [1], _EFFORT, widest_ratio)
        (ratio,) = timed.rounds[0].ratios()
        return RatedChoice(
            choice=choice, cost=ratio.value, agreement=self._agreement(graph, self._judged)
        )

    def _agreement(self, graph: bytes, judged: Dataset) -> float:
        agreement, output = agreement_of(self._answer), self._answer.output
        answers = run_over(graph, [output], judged, threads=available_cores())
        codes = [agreement.codes(agreement.reduce(values[0])) for _, values in answers]
        return float((np.concatenate(codes) == self._ends).mean())
