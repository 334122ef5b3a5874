"""Variants of a model: subnets of it, each with exits of its own, as they go into a bundle.

A subnet stands before the model as every copy does (:mod:`.cascade`): exits follow its segments,
its own answer is the last of them, and the unmodified model is behind it, which audits run. So what
is trained, recorded, certified and served of it is what is of any cascade. Exits are trained on the
subnet's own features, to answer what the *model* answers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import onnx

from offramp.bundle import Variant
from offramp.bundle.bundle import POLICY, RECORDS
from offramp.bundle.files import dump
from offramp.bundle.schema.parts import folder_of
from offramp.calibration.choose.records import dump_records
from offramp.calibration.choose.trade_offs import RecordedVariant
from offramp.compiler.blueprints.blueprint import Blueprint, CompileRun, draw, measure_copy
from offramp.compiler.blueprints.cascade import slice_subnet
from offramp.compiler.blueprints.own_answer import own_exit
from offramp.compiler.blueprints.packing import PROFILE, BuiltVariant, judged
from offramp.compiler.exits.exits import find_exits
from offramp.compiler.exits.policy import record_exits
from offramp.compiler.graphs.graph import serialised
from offramp.compiler.graphs.part_sizes import sized_segments
from offramp.compiler.graphs.source_model import SourceModel


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnVariant:
    """A subnet with its exits, before the certify split was asked."""

    name: str
    blueprint: Blueprint
    proto: onnx.ModelProto
    """The subnet as one graph, which holds its weights or names them in the model's file."""


class VariantFinder(Protocol):
    """Finds the variants of a model that are worth it."""

    @property
    def model(self) -> SourceModel:
        """The model, with its weights stored as its variants share them."""
        ...

    def find(self, plain: Blueprint, run: CompileRun) -> tuple[DrawnVariant, ...]:
        """Return variants, the largest first; ``plain`` is the model with its exits.

        Raises as :func:`draw_variant` does.
        """
        ...


def draw_variant(
    name: str, subnet: onnx.ModelProto, plain: Blueprint, run: CompileRun
) -> DrawnVariant:
    """Cut a subnet where its model ``plain`` was cut, and find exits for it.

    Raises:
        CompileError: The subnet's pieces differ from it.
        DataError: It fails on samples.
    """
    options, parts = run.options, run.parts
    copy = serialised(subnet)
    sliced = slice_subnet(plain.sliced, copy, options)
    timer, times = measure_copy(sliced, copy, run)
    found = find_exits(
        replace(sliced, cuts=sliced.cuts[:-1]),  # behind the last is the subnet's own answer
        parts,
        options,
        times,
        samples=timer.samples,
        progress=run.progress,
        scratch=run.scratch,
    )
    exits = [*found.built, own_exit(sliced, times, plain, run)]
    blueprint = draw(sliced.without_weights(), exits, run, timer=timer, times=times)
    weights = plain.sliced.weights
    kept = subnet if weights is None else weights.light(subnet)
    return DrawnVariant(name=name, blueprint=blueprint, proto=kept)


def build_variant(index: int, drawn: DrawnVariant, run: CompileRun, count: int) -> BuiltVariant:
    """Ask the certify split about a variant, and describe it as number ``index`` of ``count``.

    While serving, answers come from one and the other. So that all their certificates hold together
    with the confidence that is asked for, each is made for a ``count``-th of what is left of it.
    """
    blueprint, folder = drawn.blueprint, folder_of(index)
    draft = blueprint.draft
    title = f"Certify {drawn.name}"
    certify = record_exits(draft, draft.read, run.parts.certify, title, run.progress)
    level = 1 - (1 - run.options.confidence_level) / count
    policy = replace(blueprint.choice, confidence_level=level).certify(blueprint.path, certify)
    *own, source = sized_segments(draft, draft.read, run.parts.train.take(slice(1)))
    names = [segment.file for segment in own] + [exit_.file for exit_ in draft.exits]
    files = {
        folder + RECORDS: dump_records(blueprint.tune, certify),
        folder + PROFILE: dump(blueprint.choice.profile),
        folder + POLICY: dump(policy),
    }
    variant = Variant(
        index=index,
        name=drawn.name,
        segments=(*(replace(s, file=folder + s.file) for s in own), source),
        exits=tuple(replace(judged(e, certify), file=folder + e.file) for e in draft.exits),
    )
    graphs = {folder + name: draft.files[name] for name in names}
    recorded = RecordedVariant(
        variant=index,
        name=drawn.name,
        tune=blueprint.tune,
        cost=blueprint.choice.cost(blueprint.choice.batch_size),
        in_use=tuple(active.exit for active in policy.active),
    )
    return BuiltVariant(
        variant=variant, graphs=graphs, files=files, recorded=recorded, certify=certify
    )
