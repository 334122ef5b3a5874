"""What of a task only data and mask can say, and what is not done for each."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from offramp.calibration.dataset import DataError, Dataset
from offramp.calibration.running import run_over
from offramp.compiler.asked_task import WITHIN_SPREAD
from offramp.compiler.errors import ModelError
from offramp.compiler.graph import serialised
from offramp.compiler.model import SourceModel
from offramp.compiler.options import CompileOptions
from offramp.compiler.slicing import find_masks
from offramp.engine.options import available_cores

_log = logging.getLogger(__name__)

_SPREAD_SAMPLES = 1024
"""That the spread of values is measured on, at most."""


def settle_task(model: SourceModel, train: Dataset, options: CompileOptions) -> SourceModel:
    """Complete a model's task: the mask of its tokens, how near values have to be.

    ModelError where something was asked for that the task has not; DataError if the model fails on
    a sample, or its values do not vary.
    """
    task = model.answer.task
    if options.precision != "fp32" and task.kind != "classification":
        raise ModelError(
            f"--precision {options.precision} is for classification; the task is {task.kind}, so "
            "leave it out"
        )
    if task.kind == "token-classification":
        (output,) = model.outputs
        mask = find_masks(model.inputs, (), options.mask).get(output.shape[1])
        task = replace(task, mask=None if mask is None else mask.name)
        if mask is None:
            _log.warning("All tokens count, also padding: no input is their mask (--mask).")
    elif task.kind == "regression" and options.agree_within is None:
        task = replace(task, within=WITHIN_SPREAD * _spread(model, train))
    if task.kind != "classification":
        _log.info("Answers agree where %s.", task.describe())
    return replace(model, answer=replace(model.answer, task=task))


def _spread(model: SourceModel, train: Dataset) -> float:
    """Measure the standard deviation of the model's values, the mean over all of them."""
    some = train.subset(np.arange(min(len(train), _SPREAD_SAMPLES), dtype=np.intp))
    source, outputs = serialised(model.proto), [model.answer.output]
    batches = run_over(source, outputs, some, threads=available_cores())
    found = float(np.concatenate([answer for _, (answer,) in batches]).std(axis=0).mean())
    if not found > 0:
        raise DataError(
            f"the model answers {len(some)} samples all alike, so there is nothing to measure "
            "nearness by; give --agree-within, or other data"
        )
    return found
