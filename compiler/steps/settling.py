"""Completing a task by the data and the mask, and options that a task excludes."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from offramp.bundle import Answer, AnswerTask, TaskKind
from offramp.bundle.graph_weights import MOST_BYTES
from offramp.bundle.records import has_classes
from offramp.bundle.schema.answers import MOST_LABELS, Criterion
from offramp.calibration.data.data_sources import data_name
from offramp.calibration.data.dataset import DataError, Dataset
from offramp.calibration.data.running import run_over
from offramp.calibration.data.scratch import describe_bytes
from offramp.calibration.torch.torch_graph import check_trainable
from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.options import WITHIN_SPREAD, CompileOptions
from offramp.compiler.common.rounding import SINGLE, rounding_of
from offramp.compiler.cuts.slicing import find_masks
from offramp.compiler.exits.bridges import needs_bridges
from offramp.compiler.exits.scores import resolve_scores
from offramp.compiler.graphs.graph import serialised, weight_bytes
from offramp.compiler.graphs.source_model import SourceModel
from offramp.engine.answers.criteria import CriterionError, known_criterion
from offramp.engine.common.environment import available_cores

_log = logging.getLogger(__name__)

_ROUNDING = 1e-6
_MOST_TRAINED_BYTES = 2**29
"""Largest size in bytes of the weights of a model that is trained jointly. One graph, of at most 2
GiB, contains the weights and the bridges, which repeat most of them."""
_SPREAD_SAMPLES = 1024
"""Largest number of samples on which the standard deviation of values is measured."""


def resolve_task(model: SourceModel, train: Dataset, options: CompileOptions) -> SourceModel:
    """Complete a model's task: its scores, the mask of its tokens, the tolerance of its values.

    ModelError if an option does not fit the task, or if the user has to name the task. DataError if
    the model fails on a sample, or if its values do not vary.
    """
    model = resolve_scores(model, train, user_requested=options.reading.task != "auto")
    task = model.answer.task
    _check_asked(task, options)
    _check_size(model, options)
    _check_class_bound(model.answer, options)
    if options.copy.train == "joint":
        _check_joint(model, options)
    if task.kind == "token-classification":
        (output,) = model.outputs
        mask = find_masks(model.inputs, (), options.building.mask).get(output.shape[1])
        task = replace(task, mask=None if mask is None else mask.name)
        if mask is None:
            _log.warning("All tokens count, also padding: no input is their mask (--mask).")
    elif task.kind == "regression" and options.reading.agree_within is None:
        task = replace(task, within=WITHIN_SPREAD * _spread(model, train))
    if task.kind != "classification":
        _log.info("Answers agree where %s.", task.describe())
    criterion = _criterion(task, model.taught.task.kind, options)
    answer = replace(model.answer, task=task, criterion=criterion)
    if model.tail is None:
        return replace(model, answer=answer)
    kept = replace(model.taught.task, mask=task.mask)
    taught = replace(model.taught, task=kept, criterion=criterion)
    return replace(model, answer=answer, tail=replace(model.tail, taught=taught))


def _criterion(task: AnswerTask, taught: TaskKind, options: CompileOptions) -> Criterion:
    """Return the requested criterion; ModelError if it does not fit the model.

    ``taught`` is the task of the scores that heads imitate.
    """
    name = options.building.criterion
    try:
        criterion = known_criterion(name)
    except CriterionError as error:
        raise ModelError(f"--criterion {name}: {error}") from error
    if name != "probability" and task.kind != "classification":
        raise ModelError(
            f"--criterion {name} is for classification; the task is {task.kind}, so leave it out"
        )
    if name != "probability" and taught != "classification":
        raise ModelError(
            f"--criterion {name} is for probabilities of one class of several, and the model "
            "computes its answer from sigmoids; leave it out"
        )
    return criterion


def _check_asked(task: AnswerTask, options: CompileOptions) -> None:
    """Raise ModelError for options that a task does not support."""
    kind, precision, heads = task.kind, options.copy.precision, options.building.heads
    if precision != "fp32" and kind != "classification":
        raise ModelError(
            f"--precision {precision} is for classification; the task is {kind}, so leave it out"
        )
    if kind == "regression" and heads in ("bridges", "both"):
        raise ModelError(
            f"--heads {heads}: values carry no confidence, and a bridge ends as "
            "the model does; leave it out"
        )
    if task.is_dense and heads in ("pooled", "both"):
        raise ModelError(
            f"--heads {heads}: answers of {kind} have positions, which pooled heads "
            "do not have; leave it out"
        )


def _check_size(model: SourceModel, options: CompileOptions) -> None:
    """Raise ModelError for options that put more weights into one graph than it can contain."""
    held = weight_bytes(model.proto)
    if held <= MOST_BYTES:
        return
    most, has = describe_bytes(MOST_BYTES), describe_bytes(held)
    whole = f"one graph holds {most} of weights, and the model has {has}"
    if options.copy.precision != "fp32":
        raise ModelError(
            f"--precision {options.copy.precision}: {whole}; leave it out, or quantise the model "
            "first"
        )
    if needs_bridges(model.answer, options):
        raise ModelError(
            f"exits of {model.answer.task.kind} with --heads {options.building.heads} repeat "
            f"layers of the model: {whole}; store it in half precision, or serve it unchanged: "
            "eeserve MODEL.onnx"
        )


def _check_joint(model: SourceModel, options: CompileOptions) -> None:
    """Raise ModelError for models that cannot be trained together with their exits."""
    task, rounding = model.answer.task, rounding_of(model.proto)
    if rounding is not SINGLE:
        raise ModelError(
            f"--train joint is for models in single precision, and this one is {rounding.name}; "
            "train the float32 model"
        )
    if task.kind == "regression":
        raise ModelError(
            "--train joint: values carry no confidence, so a copy's own answers could "
            "not leave; leave it out"
        )
    if model.answer.form == "classes":
        raise ModelError(
            "--train joint learns scores, and the model answers with classes alone; leave out "
            "--class-map, or export it without its ArgMax"
        )
    if options.copy.teach == "labels" and task.kind != "classification":
        raise ModelError(
            f"--teach labels is for classification; the task is {task.kind}, so leave it out: the "
            "model's own answers teach"
        )
    if options.copy.teach == "labels" and model.tail is not None:
        raise ModelError(
            "--teach labels is for models that end with their scores of classes, and this one ends "
            f"with {', '.join(model.tail.kinds) or 'sigmoids'} after them; leave it out: the "
            "model's own answers teach"
        )
    if (held := weight_bytes(model.proto)) > _MOST_TRAINED_BYTES:
        most = describe_bytes(_MOST_TRAINED_BYTES)
        raise ModelError(
            f"--train joint: the model has {describe_bytes(held)} of weights, expected at most "
            f"{most}, as one graph contains it with all exits; leave it out"
        )
    check_trainable(model.proto)


def _check_class_bound(answer: Answer, options: CompileOptions) -> None:
    """Raise ModelError for a bound on each class if the classes of answers are not recorded."""
    bound = options.promise.max_class_disagreement
    if bound is not None and not has_classes(answer):
        raise ModelError(
            f"--max-class-disagreement {bound:g} is for classification and for up to {MOST_LABELS} "
            f"labels; the task is {answer.task.kind} with {answer.classes} classes, so leave it out"
        )


def check_teacher(dataset: Dataset, answer: Answer, options: CompileOptions) -> None:
    """Raise DataError if the data's labels cannot teach a model."""
    if options.copy.teach != "labels":
        return
    if dataset.labels is None:
        raise DataError(
            f"--teach labels: {data_name(options.data)} has no labels; add an array "
            "'labels' of classes"
        )
    wrong = np.flatnonzero((dataset.labels < 0) | (dataset.labels >= answer.classes))
    if wrong.size:
        raise DataError(
            f"--teach labels: sample {wrong[0]} of {data_name(options.data)} has the label "
            f"{dataset.labels[wrong[0]]}, expected classes from 0 to {answer.classes - 1}, as the "
            "model numbers them"
        )


def _spread(model: SourceModel, train: Dataset) -> float:
    """Return the standard deviation of the model's values over the samples, averaged."""
    some = train.subset(np.arange(min(len(train), _SPREAD_SAMPLES), dtype=np.intp))
    source, outputs = serialised(model.proto), [model.answer.output]
    batches = run_over(source, outputs, some, threads=available_cores())
    answers = np.concatenate([answer for _, (answer,) in batches])
    found = float(answers.std(axis=0).mean())
    if not found > _ROUNDING * np.abs(answers).max():
        raise DataError(
            f"the model answers all {len(some)} samples alike, so --agree-within cannot be "
            "derived from the spread; set --agree-within, or use other data"
        )
    return found
