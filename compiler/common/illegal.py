"""Options of ``eecompile`` that exclude or need each other, as tables.

Each row holds for every model. Options that a certain model excludes are refused once it is read
(:mod:`offramp.compiler.steps.settling`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from offramp.bundle.schema.answers import IN_GRAPH
from offramp.commands.combinations import Illegal, IllegalCombinationError, refuse_illegal
from offramp.compiler.common.errors import OptionsConflictError
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.data.spec import OPTIONS
from offramp.engine.answers.criteria import CriterionError, known_criterion


def depends_on_earlier(values: Mapping[str, object]) -> bool:
    """Whether the criterion looks at earlier exits."""
    try:
        return known_criterion(str(values["--criterion"])).depends_on_earlier
    except CriterionError:  # refused by itself
        return False


def _is_not_probability(values: Mapping[str, object]) -> bool:
    return values["--criterion"] != "probability"


def _is_learned_or_depends(values: Mapping[str, object]) -> bool:
    return values["--criterion"] == "learned" or depends_on_earlier(values)


def _is_on_host(values: Mapping[str, object]) -> bool:
    return values["--criterion"] not in IN_GRAPH


_READING: Final = tuple(
    Illegal(option=flag, without="--data",
            why="it says how data are read; leave it out, or add --data")
    for flag in ("--preprocessing", *(option.flag for option in OPTIONS))
)  # fmt: skip
_ONE_MODEL = "it is for exits of the float32 model as it is; take probability, entropy or margin"
_UNCERTIFIED = "nothing is certified on made inputs; leave it out, or give samples"

NO_ENGINES: Final = (
    Illegal(option="--criterion", beside="--backend tensorrt", when=_is_on_host,
            why="the host computes this criterion, which is for CPUs; choose probability, "
            "entropy, margin or learned, or --backend onnxruntime"),
    Illegal(option="--train joint", beside="--backend tensorrt",
            why="a bundle with a copy of the model is for ONNX Runtime; leave one of them out"),
    Illegal(option="--precision int8|auto", beside="--backend tensorrt",
            why="the int8 copy is for CPUs, and engines are made of a float32 bundle; compile "
            "without --precision, then eecompile build --precision int8 or auto"),
    Illegal(option="--custom-ops", beside="--backend tensorrt",
            why="TensorRT's engines cannot hold operators of a library; choose --backend "
            "onnxruntime, for serving too"),
)  # fmt: skip
"""Options of a bundle that has no engines: ``--backend auto`` builds none then."""

COMPILE: Final[tuple[Illegal, ...]] = (
    *NO_ENGINES,
    *_READING,
    Illegal(option="--criterion", beside="--heads bridges|both", when=_is_not_probability,
            why="criteria are for pooled heads; leave one of them out"),
    Illegal(option="--criterion", beside="--precision int8|auto", when=_is_learned_or_depends,
            why=_ONE_MODEL),
    Illegal(option="--criterion", beside="--train joint", when=_is_learned_or_depends,
            why=_ONE_MODEL),
    Illegal(option="--criterion", beside="--selection pame", when=depends_on_earlier,
            why="all exits have to run for this criterion, and pame takes single ones; leave one "
            "of them out"),
    Illegal(option="--heads bridges|both", beside="--precision int8|auto",
            why="bridges are for float32; leave one of them out"),
    Illegal(option="--train joint", beside="--precision int8|auto",
            why="a bundle has one copy of the model; leave one of them out"),
    Illegal(option="--train joint", beside="--class-map",
            why="joint training learns scores, and classes alone have none; leave one of them out"),
    Illegal(option="--teach labels", without="--train joint",
            why="only the copy of the model learns from labels; add it, or leave this out"),
    Illegal(option="--joint-rate", without="--train joint",
            why="it is the learning rate of the copy; add --train joint, or leave this out"),
    Illegal(option="--max-overhead", beside="--selection pame",
            why="pame bounds late batches instead; use --max-violations, or leave --selection "
            "out"),
    Illegal(option="--rehearsal-batch", without="--selection pame",
            why="nothing is rehearsed then; add it, or leave this out"),
    Illegal(option="--max-violations", without="--selection pame",
            why="nothing is rehearsed then; add it, or leave this out"),
    Illegal(option="--candidates", beside="--exits",
            why="--exits names all places; leave one of them out"),
    Illegal(option="--simplify-limit", beside="--no-simplify",
            why="onnxslim does not run; leave one of them out"),
    *(Illegal(option=option, beside="--data random", why=_UNCERTIFIED)
      for option in ("--max-disagreement", "--confidence", "--max-class-disagreement", "--group",
                     "--copies-within", "--teach labels")),
)  # fmt: skip

_AS_THERE = "the engines that are there say it; leave one of them out"
_KEPT = "auto keeps what is certified; leave one of them out"
BUILD: Final = (
    *_READING,
    Illegal(option="--units", beside="--parts",
            why="both choose what is built; leave one of them out"),
    *(Illegal(option="--beside-serving", beside=other, why=_AS_THERE)
      for other in ("--batch-profiles", "--buckets", "--workspace", "--optimization-level")),
    Illegal(option="--precision auto", beside="--dry-run",
            why="what is built is known once engines have been timed; leave one of them out"),
    Illegal(option="--precision auto", beside="--beside-serving",
            why="a server keeps the precision that it began with; give that precision"),
    Illegal(option="--precision auto", beside="--accept-disagreement", why=_KEPT),
    Illegal(option="--precision auto", beside="--units",
            why="engines of all stages are timed; leave one of them out"),
    Illegal(option="--precision auto", beside="--parts",
            when=lambda values: not {"source", "stages"} <= {*str(values["--parts"]).split(",")},
            why="engines of source and stages are timed; name both, or leave --parts out"),
    Illegal(option="--precision int8", without="--data",
            why="the ranges of activations are measured on calibration data; give that which the "
            "bundle was compiled with"),
)  # fmt: skip

EXPORT: Final = (
    *_READING,
    Illegal(option="--kserve", without="--triton",
            why="KServe runs Triton on its repository; add --triton DIR"),
    Illegal(option="--name", without="--triton", when=lambda values: values["--ovms"] is None,
            why="it is the model's name in a repository; add --triton DIR, or --ovms DIR"),
)  # fmt: skip


def check_options(options: CompileOptions) -> None:
    """Refuse combinations of options that come from Python, by an OptionsConflictError.

    An option counts as given where it differs from its default.
    """
    names = {field.name: f"--{field.name.replace('_', '-')}" for field in fields(options)}
    names["confidence_level"] = "--confidence"
    if options.variants is not None:
        names["variants"] = options.variants.flag
    values = {flag: getattr(options, name) for name, flag in names.items()}
    given = {
        names[field.name]
        for field in fields(options)
        if getattr(options, field.name) != field.default
    }
    source, table = options.variants, COMPILE
    if source is not None:
        table += tuple(source.combinations)
    try:
        refuse_illegal(table, values, given)
    except IllegalCombinationError as error:
        raise OptionsConflictError(str(error)) from error
