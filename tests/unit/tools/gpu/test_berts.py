"""BERT as it is measured: its parts are those of a BERT, and the mask hides what is padding."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
from tests.small_bert import SIZE

from offramp.tools.gpu import berts


def session(seed: int = 0) -> ort.InferenceSession:
    graph = berts.bert(SIZE, seed).SerializeToString()
    return ort.InferenceSession(graph, providers=["CPUExecutionProvider"])


def test_padding_changes_no_answer() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, SIZE.vocabulary, (3, SIZE.tokens))
    mask = (np.arange(SIZE.tokens) < np.array([[3], [5], [8]])).astype(np.int64)
    bert = session()
    (plain,) = bert.run(None, {berts.IDS: ids, berts.MASK: mask})
    (other,) = bert.run(None, {berts.IDS: np.where(mask, ids, 7), berts.MASK: mask})
    assert plain.shape == (3, SIZE.classes)
    np.testing.assert_allclose(other, plain, atol=1e-6)
    (changed,) = bert.run(None, {berts.IDS: (ids + mask) % SIZE.vocabulary, berts.MASK: mask})
    assert np.abs(changed - plain).max() > 1e-3


def test_of_any_length_it_answers_as_that_of_one() -> None:
    proto = berts.bert(SIZE, any_length=True)
    free = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(0).integers(0, SIZE.vocabulary, (2, SIZE.tokens))
    (fixed,) = session().run(None, {berts.IDS: ids, berts.MASK: np.ones_like(ids)})
    (found,) = free.run(None, {berts.IDS: ids, berts.MASK: np.ones_like(ids)})
    np.testing.assert_allclose(found, fixed, atol=1e-6)
    short = {berts.IDS: ids[:, :5], berts.MASK: np.ones_like(ids[:, :5])}
    mask = (np.arange(SIZE.tokens) < 5) * np.ones_like(ids)
    (masked,) = session().run(None, {berts.IDS: ids, berts.MASK: mask})
    np.testing.assert_allclose(free.run(None, short)[0], masked, atol=1e-5)


def test_a_layer_has_the_weights_that_devlin_gives_it() -> None:
    def weights(layers: int) -> int:
        size = berts.BertSize(layers=layers, vocabulary=10, tokens=4)
        return sum(int(np.prod(w.dims)) for w in berts.bert(size).graph.initializer)

    assert weights(2) - weights(1) == 7_087_872  # 12 × width² and 13 × width


def test_the_seed_decides_the_weights() -> None:
    assert berts.bert(SIZE, 1) == berts.bert(SIZE, 1)
    assert berts.bert(SIZE, 1) != berts.bert(SIZE, 2)
