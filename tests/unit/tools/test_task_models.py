"""The small models that answer with more than one class: their data, training and export."""

from __future__ import annotations

import gzip
import json
import warnings
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.frontend.model import read_model
from offramp.tools.zoo import sentences, task_models
from offramp.tools.zoo.garments import (
    CANVAS,
    GARMENT,
    Garments,
    draw_label_sets,
    draw_measures,
    draw_poses,
    draw_scenes,
    key_points,
    read_garments,
    share_out,
)
from offramp.tools.zoo.sentences import (
    BY_BOTH,
    BY_CLOSING,
    BY_LEXICON,
    BY_OPENING,
    BY_WORD_BEFORE,
    CLOSING,
    CLOSINGS,
    LONGEST,
    NAME,
    NO_CLASS,
    OPENING,
    OPENINGS,
    PADDING,
    PAST,
    PRESENT,
    QUALITY,
    SHORTEST,
    VERB,
    classify,
    draw_sentences,
)
from offramp.tools.zoo.small_models import Parts, Samples
from offramp.tools.zoo.task_models import (
    TASKS,
    make,
    read_sentences,
    right_label_sets,
    right_places,
    right_points,
    right_values,
)
from offramp.tools.zoo.task_networks import (
    KeyPointNet,
    Labeller,
    Measurer,
    Segmenter,
    WordTagger,
    heat_maps,
)

SQUARE = (slice(4, 24), slice(8, 20))
"""Area covered by a garment in these tests."""
REGIONS = ((8, 2), (12, 2))
TINY: dict[str, Callable[[], nn.Module]] = {
    "segmentation": lambda: Segmenter(REGIONS),
    "pose": lambda: KeyPointNet(REGIONS, width=8),
    "tokens": lambda: WordTagger(width=16, depth=3, heads=2),
    "labels": lambda: Labeller(REGIONS),
    "values": lambda: Measurer(REGIONS),
}
DRAWN: dict[str, Callable[..., tuple[NDArray[np.uint8], NDArray[Any]]]] = {
    "segmentation": draw_scenes,
    "pose": draw_poses,
    "labels": draw_label_sets,
    "values": draw_measures,
}


def squares(count: int = 3) -> Garments:
    """Bright rectangles, as garments of the kinds 0, 1, ….

    Kinds differ in the brightness of a corner alone.
    """
    images = np.zeros((count, 28, 28), np.uint8)
    images[(slice(None), *SQUARE)] = 250
    images[:, 4, 8] = np.arange(count) + 200
    return Garments(images=images, kinds=np.arange(count, dtype=np.uint8))


def test_scenes_show_garments_where_their_pixels_are_labelled() -> None:
    images, classes = draw_scenes(squares(), 40, seed=0)

    assert (images.shape, images.dtype) == ((40, 1, CANVAS, CANVAS), np.uint8)
    assert (classes.shape, classes.dtype) == ((40, CANVAS, CANVAS), np.uint8)
    assert set(np.unique(classes)) == {0, 1, 2, 3}
    # Garments have at least half their brightness, and noise deviates by 30 at most.
    covered = classes > 0
    assert images[:, 0][covered].mean() > 125
    assert images[:, 0][~covered].mean() < 15
    garment = 20 * 12
    sizes = covered.sum(axis=(1, 2))
    assert sizes.min() >= garment and sizes.max() <= 3 * garment
    assert np.count_nonzero(sizes == garment) >= 10  # scenes of one garment


def test_label_sets_name_the_kinds_that_are_to_be_seen() -> None:
    images, labels = draw_label_sets(squares(), 40, seed=0)
    scenes, classes = draw_scenes(squares(), 40, seed=0)
    np.testing.assert_array_equal(images, scenes)
    assert (labels.shape, labels.dtype) == ((40, 10), np.uint8)
    assert {*labels.sum(axis=1).tolist()} == {1, 2, 3}
    for label, scene in zip(labels, classes, strict=True):
        seen = [np.count_nonzero(scene == kind + 1) for kind in range(10)]
        assert label.tolist() == [int(pixels >= 60) for pixels in seen]


def test_measures_are_of_the_garment() -> None:
    images, measures = draw_measures(squares(), 30, seed=0)
    assert (images.shape, images.dtype) == ((30, 1, CANVAS, CANVAS), np.uint8)
    assert (measures.shape, measures.dtype) == ((30, 3), np.float32)
    np.testing.assert_allclose(measures[:, 2], 20 * 12 / GARMENT**2)
    for image, (row, column, _) in zip(images[:, 0], measures * CANVAS, strict=True):
        shape = image[round(row) - 9 : round(row) + 10, round(column) - 5 : round(column) + 6]
        assert shape.mean() > 100 > 40 > image.mean()
    assert measures[:, :2].std(axis=0).min() > 0.05  # places vary


def test_scenes_are_those_of_the_seed() -> None:
    for draw in DRAWN.values():
        first, again, other = (draw(squares(), 5, seed=seed) for seed in (1, 1, 2))
        for one, two in zip(first, again, strict=True):
            np.testing.assert_array_equal(one, two)
        assert (first[0] != other[0]).any()


def test_poses_have_the_outermost_points_and_the_centre_of_the_garment() -> None:
    images, points = draw_poses(squares(), 30, seed=0)

    assert (images.shape, images.dtype) == ((30, 1, CANVAS, CANVAS), np.uint8)
    assert (points.shape, points.dtype) == ((30, 5, 2), np.int64)
    left, right, top, bottom, centre = np.moveaxis(points, 1, 0)
    assert (right[:, 1] - left[:, 1] == 11).all()
    assert (bottom[:, 0] - top[:, 0] == 19).all()
    assert (abs(centre - (left + right) / 2) <= 1).all()
    for image, row_column in zip(images[:, 0], centre, strict=True):
        assert image[tuple(row_column)] > 60
    assert len(np.unique(left[:, 1])) > 5  # places vary


def test_key_points_of_a_cross_are_its_ends() -> None:
    shape = np.zeros((20, 30), np.bool_)
    shape[9:12, 4:25] = True
    shape[2:19, 13:16] = True
    assert key_points(shape).tolist() == [[10, 4], [10, 24], [2, 14], [18, 14], [10, 14]]


def test_heat_maps_are_highest_at_the_points() -> None:
    points = torch.tensor([[[0, 0], [21, 40]], [[55, 55], [31, 3]]])
    maps = heat_maps(points, 28)
    assert maps.shape == (2, 2, 28, 28)
    rows, columns = np.divmod(maps.flatten(2).argmax(2).numpy(), 28)
    np.testing.assert_array_equal(rows, points[..., 0].numpy() // 2)
    np.testing.assert_array_equal(columns, points[..., 1].numpy() // 2)
    assert 0.9 < maps.amax((2, 3)).min() <= maps.max() <= 1


def test_no_garment_is_in_two_parts() -> None:
    images = np.arange(200, dtype=np.uint8)[:, None, None] * np.ones((28, 28), np.uint8)
    shared = share_out(Garments(images=images, kinds=np.zeros(200, np.uint8)), seed=0)
    assert [len(part) for part in shared] == [140, 30, 30]
    assert len({image.tobytes() for part in shared for image in part.images}) == 200


def _write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()))


def test_garments_are_read_once_each(tmp_path: Path) -> None:
    images = squares(4).images
    for part, rows, kinds in (("train", [0, 1, 0], [5, 6, 5]), ("t10k", [1, 3], [6, 8])):
        _write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images[rows])
        _write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.array(kinds, np.uint8))
    garments = read_garments(tmp_path)
    np.testing.assert_array_equal(garments.images, images[[0, 1, 3]])
    assert garments.kinds.tolist() == [5, 6, 8]


def test_garments_that_are_not_there_are_told_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"dataset-fashion-mnist.*--images"):
        read_garments(tmp_path)


def test_sentences_are_clauses_of_words_with_classes() -> None:
    ids, classes = draw_sentences(200, seed=0)

    assert ids.shape == classes.shape == (200, LONGEST)
    assert len({row.tobytes() for row in ids}) == 200
    lengths = (ids != PADDING).sum(axis=1)
    assert (lengths.min(), lengths.max()) == (SHORTEST, LONGEST)
    for words, labels, length in zip(ids, classes, lengths, strict=True):
        assert words[0] in OPENINGS and words[length - 1] in CLOSINGS
        assert (words[length:] == PADDING).all()
        assert (labels[length:] == NO_CLASS).all()
        ends = [word in CLOSINGS for word in words[:length]]
        opens = [word in OPENINGS for word in words[:length]]
        assert opens[1:] == ends[:-1]  # clauses follow each other
    known = np.isin(ids, BY_LEXICON)
    assert 0.6 < known.sum() / lengths.sum() < 0.8
    np.testing.assert_array_equal(classes[known], NAME + (ids[known] - BY_LEXICON.start) % 5)


def test_sentences_are_those_of_the_seed() -> None:
    first, again, other = (draw_sentences(20, seed=seed) for seed in (1, 1, 2))
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, two)
    assert (first[0] != other[0]).any()


@pytest.mark.parametrize("opening", [0, 1])
@pytest.mark.parametrize("closing", [0, 1])
def test_context_tells_the_class_of_some_words(opening: int, closing: int) -> None:
    quality, name = BY_LEXICON.start + QUALITY - NAME, BY_LEXICON.start
    other_clause = [OPENINGS[4 - 4 * opening], BY_OPENING[0], name, CLOSINGS[4 - 4 * closing]]
    clause = [
        OPENINGS[4 * opening],
        *(quality, BY_WORD_BEFORE[0], name, BY_WORD_BEFORE[1]),
        *(BY_OPENING[2], BY_CLOSING[3], BY_BOTH[4]),
        CLOSINGS[4 * closing],
    ]
    found = classify(np.array([*other_clause, *clause, *other_clause]))
    tenses = (PAST, PRESENT)
    assert found[4:13] == [
        OPENING,
        *(QUALITY, NAME, NAME, VERB),
        *(tenses[opening], tenses[closing], VERB if opening == closing else QUALITY),
        CLOSING,
    ]
    assert found[1] == tenses[1 - opening]


def test_no_sentence_is_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_models, "CALIBRATION", 20)
    monkeypatch.setattr(task_models, "TEST", 10)
    monkeypatch.setattr(
        task_models, "draw_sentences", lambda count, seed: draw_sentences(count // 100, seed=seed)
    )
    parts = read_sentences(Namespace(seed=0))
    assert {*parts.train.inputs} == {"input_ids", "attention_mask"}
    ids, mask = parts.train.inputs["input_ids"], parts.train.inputs["attention_mask"]
    np.testing.assert_array_equal(mask, ids != sentences.PADDING)


def parts_of(name: str) -> Parts:
    if name == "tokens":
        ids, classes = draw_sentences(96, seed=0)
        inputs = {"input_ids": ids, "attention_mask": (ids != PADDING).astype(np.int64)}
    else:
        kinds = 1 if name == "labels" else 3  # which a corner tells apart, too little to be learned
        images, classes = DRAWN[name](squares(kinds), 96, seed=0)
        inputs = {"image": images}
    samples = Samples(inputs=inputs, labels=classes)
    return Parts(train=samples, calibration=samples[:8], test=samples[:32])


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_one_learns_and_its_export_is_the_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, task = parts_of(name), TASKS[name]
    kept: list[nn.Module] = []

    def make_tiny() -> nn.Module:
        kept.append(TINY[name]())
        return kept[-1]

    recipe = replace(task.recipe, make=make_tiny, read=lambda _: parts, epochs=10, batch_size=16)
    monkeypatch.setitem(TASKS, name, replace(task, recipe=recipe))
    torch.manual_seed(0)
    before = recipe.test(TINY[name]().eval(), parts.test)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns of itself
        folder = make(name, Namespace(output=tmp_path, seed=0, threads=1))

    after = json.loads((folder / "training.json").read_text())["test_accuracy"]
    assert after > before + 0.1
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    feeds = {k: v[:5] for k, v in parts.test.inputs.items()}
    (answer,) = session.run([task.output], feeds)
    with torch.no_grad():
        expected = kept[0](*parts.test[:5].tensors()).numpy()
    np.testing.assert_allclose(answer, expected, atol=2e-4)  # sums of float32 in another order
    assert len(find_cuts(read_model(folder / "model.onnx")).cuts) >= 3
    with np.load(folder / "calibration.npz") as saved:
        assert {*saved} == {*parts.test.inputs, "label"}
        assert len(saved["label"]) == 8


def test_the_export_of_the_tagger_takes_sentences_of_any_length(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, samples = TINY["tokens"]().eval(), parts_of("tokens").test
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        task_models.export(model, tmp_path / "m.onnx", samples, symbolic=TASKS["tokens"].symbolic)
    session = ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {k: v[:3, :20] for k, v in samples.inputs.items()})
    assert logits.shape == (3, 20, 7)


class Fixed(nn.Module):
    """Answers the same to every sample."""

    def __init__(self, answer: NDArray[np.float32]) -> None:
        super().__init__()
        self.answer = torch.from_numpy(answer)

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        return self.answer.expand(len(first), *self.answer.shape)


def test_right_places_are_those_with_a_label() -> None:
    logits = np.zeros((4, 7), np.float32)
    logits[:, 2] = 1
    labels = np.array([[2, 2, 3, NO_CLASS], [2, NO_CLASS, NO_CLASS, NO_CLASS]])
    samples = Samples(inputs={"x": np.zeros((2, 4), np.int64)}, labels=labels)
    assert right_places(Fixed(logits), samples) == 3 / 4

    pixels = np.zeros((3, 2, 2), np.float32)
    pixels[1] = 1
    labels = np.array([[[1, 1], [1, 0]]], np.uint8)
    samples = Samples(inputs={"x": np.zeros((1, 4), np.int64)}, labels=labels)
    assert right_places(Fixed(pixels), samples) == 3 / 4


def test_right_label_sets_are_whole() -> None:
    labels = np.array([[0, 1, 1], [0, 1, 0], [0, 1, 1], [1, 1, 1]], np.uint8)
    samples = Samples(inputs={"x": np.zeros((4, 1), np.int64)}, labels=labels)
    assert right_label_sets(Fixed(np.array([0.4, 0.5, 0.9], np.float32)), samples) == 2 / 4


def test_right_values_are_close() -> None:
    values = np.array([[0.5, 0.1], [0.51, 0.13], [0.4, 0.09]], np.float32)
    samples = Samples(inputs={"x": np.zeros((3, 1), np.int64)}, labels=values)
    assert right_values(Fixed(values[0]), samples) == 4 / 6


def test_right_points_are_near() -> None:
    points = np.array([[[20, 20], [20, 24]], [[20, 24], [50, 50]]])
    maps = heat_maps(torch.from_numpy(points[:1]), 28)[0].numpy()
    samples = Samples(inputs={"x": np.zeros((2, 1), np.int64)}, labels=points)
    # Of the second sample the first map is almost two cells off, which is too far.
    assert right_points(Fixed(maps), samples) == 2 / 4
