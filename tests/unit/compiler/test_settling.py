"""Task settings that depend on data and mask, and options that a task does not have."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import models
from tests.facts import Told, facts
from tests.sliced import inputs_of, slice_proto

from offramp.bundle.schema.answers import AnswerTask
from offramp.calibration.data.dataset import DataError, Dataset
from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.steps.settling import resolve_task

SOME = Path("any")


def settled(task: AnswerTask, builder: Any, *, same: bool = False, **options: Any) -> AnswerTask:
    pieces = slice_proto(builder())
    answer = replace(
        pieces.model.answer, form="values" if task.kind == "regression" else "logits", task=task
    )
    inputs = inputs_of(pieces, 64)
    if same:
        inputs = {name: np.repeat(array[:1], 64, axis=0) for name, array in inputs.items()}
    data = Dataset(inputs=inputs, labels=None, sha256="")
    asked = CompileOptions.of(model=SOME, data=SOME, output=SOME, **options)
    return resolve_task(replace(pieces.model, answer=answer), data, asked).answer.task


def test_values_are_near_by_their_own_spread() -> None:
    task = settled(AnswerTask(kind="regression"), models.mlp)
    pieces = slice_proto(models.mlp())
    assert 0 < task.within < 10
    assert settled(AnswerTask(kind="regression", within=3), models.mlp, agree_within=3).within == 3
    assert pieces.model.answer.task.within == 0


@pytest.mark.parametrize(
    ("task", "model", "options", "told"),
    [
        ("classification", models.mlp, {"precision": "int8"}, "--precision int8: one graph holds"),
        ("classification", models.mlp, {"heads": "bridges"}, "exits of classification with"),
        ("token-classification", partial(models.bert_like, tags=4), {}, "exits of token-class"),
    ],
)
def test_what_puts_most_weights_into_one_graph_has_a_limit(
    monkeypatch: pytest.MonkeyPatch, task: Any, model: Any, options: dict[str, str], told: str
) -> None:
    settled(AnswerTask(kind=task), model, **options)
    monkeypatch.setattr("offramp.compiler.steps.settling.MOST_BYTES", 1000)
    settled(AnswerTask(kind="classification"), models.mlp)
    with pytest.raises(ModelError, match=told):
        settled(AnswerTask(kind=task), model, **options)


def test_values_that_do_not_vary_have_no_spread() -> None:
    with pytest.raises(DataError, match=facts("64 samples", "alike", "--agree-within")):
        settled(AnswerTask(kind="regression"), models.mlp, same=True)


def test_the_mask_of_tokens_is_found_and_its_lack_is_said(caplog: Any) -> None:
    def tagger() -> Any:
        return models.bert_like(tags=4)

    def without() -> Any:
        return models.bert_like(tags=4, mask=False)

    task = AnswerTask(kind="token-classification", share=0.9)
    assert settled(task, tagger).mask == "attention_mask"
    assert settled(task, without).mask is None
    assert "All tokens count, also padding" in caplog.text


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("multi-label", {"precision": "auto"}, ("--precision auto", "classification")),
        ("regression", {"heads": "bridges"}, ("--heads bridges", "values")),
        ("segmentation", {"heads": "pooled"}, ("--heads pooled", "segmentation")),
        ("multi-label", {"heads": "both", "precision": "auto"}, ("classification",)),
    ],
)
def test_options_that_a_task_does_not_have(kind: Any, options: dict[str, Any], told: Told) -> None:
    with pytest.raises(ModelError, match=facts(*told)):
        settled(AnswerTask(kind=kind), models.mlp, **options)
