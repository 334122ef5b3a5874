"""Each task on a real server in audit mode, called by our client and by tritonclient.

Responses are compared with ONNX Runtime on the bundle's graphs and on the compiled file. Audited
samples are random; so samples that agree, computed here with numpy, are sent first, and those that
disagree after them: each count is then known, however many were audited.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from numpy.typing import NDArray
from tests import decoders, models
from tests.e2e.conftest import Server, launcher, wait_until
from tests.e2e.test_clients import triton_inputs
from tests.padded import Arrays, answers
from tests.tasks import CASES, Case, compiled, images

from offramp.bundle import Bundle
from offramp.client import Client
from offramp.compiler.common.rounding import SINGLE
from offramp.engine.backends.onnxruntime import make_session

pytestmark = pytest.mark.slow

Array = NDArray[Any]
BATCH, REQUESTS = 8, 50
"""Samples of each kind: of 400 samples, at one in twenty, some are audited (except 1 in 10^8)."""


def prompts(samples: int, *, seed: int = 0) -> Arrays:
    return decoders.prompts(samples, 12, seed=seed)


def _case(name: str, **terms: float) -> Case:
    build, data, options = CASES[name]
    return build, data, {**options, **terms}


TASKS: dict[str, Case] = {
    "multi-label": _case("multi-label", max_disagreement=0.25),
    "token-classification": _case("token-classification", agree_share=0.6, max_disagreement=0.35),
    "segmentation": _case("segmentation", agree_share=0.65, max_disagreement=0.2),
    "class-map": _case("a byte a pixel", agree_share=0.65, max_disagreement=0.2),
    "pose": (
        functools.partial(models.residual_cnn, dense="Sigmoid"),
        images,
        {"task": "pose", "agree_share": 0.6, "agree_within": 0.4, "max_disagreement": 0.25},
    ),
    "regression": _case("regression", agree_within=0.42, max_disagreement=0.16),
    "decoder": (
        functools.partial(decoders.decoder, cache=True),
        prompts,
        {"answer_tokens": decoders.TOKENS, "max_disagreement": 0.12},
    ),
}
"""Random models learn little, so that terms are such that some samples can leave."""

WORDS = {
    "multi-label": "all labels are the same",
    "token-classification": "at least 60 % of the tokens have the same class",
    "segmentation": "at least 65 % of the pixels have the same class",
    "class-map": "at least 65 % of the pixels have the same class",
    "pose": "at least 60 % of the key points are within 40 % of the map's longer side",
    "regression": "all values differ by at most 0.42",
}
"""Texts on the status page; none for a decoder, which is a classifier."""

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "multi-label": ("float32", (3,)),
    "token-classification": ("float32", (12, 4)),
    "segmentation": ("float32", (5, 16, 16)),
    "class-map": ("uint8", (16, 16)),
    "pose": ("float32", (5, 16, 16)),
    "regression": ("float32", (3,)),
    "decoder": ("float32", (3,)),
}


def _tokens_agree(ours: Array, ends: Array, inputs: Arrays) -> Array:
    counts = inputs["attention_mask"] == 1
    same = (ours.argmax(axis=2) == ends.argmax(axis=2)) & counts
    return np.asarray(same.sum(axis=1) / counts.sum(axis=1) >= 0.6)


def _points_agree(ours: Array, ends: Array) -> Array:
    def places(maps: Array) -> Array:
        flat = maps.reshape(len(maps), 5, 256).argmax(axis=2)
        return np.stack([flat // 16, flat % 16])

    apart = np.sqrt(((places(ours) - places(ends)) ** 2).sum(axis=0))
    return np.asarray((apart <= 0.4 * 16).mean(axis=1) >= 0.6)


AGREE: dict[str, Callable[[Array, Array, Arrays], Array]] = {
    "multi-label": lambda ours, ends, _: ((ours >= 0.5) == (ends >= 0.5)).all(axis=1),
    "token-classification": _tokens_agree,
    "segmentation": lambda ours, ends, _: (
        (ours.argmax(axis=1) == ends.argmax(axis=1)).mean(axis=(1, 2)) >= 0.65
    ),
    "class-map": lambda ours, ends, _: (ours == ends).mean(axis=(1, 2)) >= 0.65,
    "pose": lambda ours, ends, _: _points_agree(ours, ends),
    "regression": lambda ours, ends, _: (np.abs(ours - ends) <= np.float32(0.42)).all(axis=1),
    "decoder": lambda ours, ends, _: ours.argmax(axis=1) == ends.argmax(axis=1),
}
"""When an answer agrees with the unmodified model's, said again: [n] of answers [n, …]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Samples with what they should be answered, as ONNX Runtime says of each graph alone."""

    inputs: Arrays
    exits: Array
    """[n]: the exit that should answer."""
    answers: Array
    """[n, …]: of this exit, or of the file that was compiled."""

    def part(self, chosen: Array) -> Samples:
        """A batch of some of them, by their numbers."""
        return Samples(
            inputs={name: array[chosen] for name, array in self.inputs.items()},
            exits=self.exits[chosen],
            answers=self.answers[chosen],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """A server's counts of a model's audits."""

    audited: float
    disagreed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A server's responses to samples of a task."""

    found: list[tuple[Samples, Array, Array]]
    """Batches, with the answers and exits that a client was told."""
    agreeing: Counts
    """After samples that stay until the end, and those whose exit agrees with it."""
    all: Counts
    """After those whose exit does not agree, too."""


def unmodified(name: str, folder: Path, inputs: Arrays) -> Array:
    """Return the answers of the compiled file, in the bundle's form."""
    path = folder / "model.onnx"
    session = make_session(path.read_bytes(), 1)
    output = session.get_outputs()[0].name
    if name == "decoder":
        logits = session.run([output], decoders.with_past(onnx.load(path), inputs))[0]
        last = inputs["attention_mask"].sum(axis=1) - 1
        chosen: Array = logits[np.arange(len(last)), last][:, decoders.TOKENS]
        return chosen
    found: Array = session.run([output], inputs)[0]
    return found.argmax(axis=1).astype(np.uint8) if name == "class-map" else found


def check_equal(found: Array, wanted: Array) -> None:
    """Equal but for the rounding of sums in another order."""
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    if found.dtype.kind in "iu":  # where two scores are equal but for rounding
        assert (found == wanted).mean() > 0.999
    else:
        allowed = SINGLE.batches * float(np.abs(wanted).max(initial=1.0))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=allowed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tasks")


@pytest.fixture(scope="module")
def bundles(folder: Path) -> dict[str, Bundle]:
    """Return a certified bundle of each task; every timed run takes 1 ms."""
    found = {}
    for name, (build, data, options) in TASKS.items():
        (place := folder / name).mkdir()
        found[name] = compiled(build, data, place, name=name, **options)
        assert found[name].policy.active, "on these terms exits are in use"
    return found


@pytest.fixture(scope="module")
def server(bundles: dict[str, Bundle], folder: Path) -> Iterator[Server]:
    """Yield one server of all bundles, which compares all answers, and changes no threshold."""
    paths = [bundle.path for bundle in bundles.values()]
    with ExitStack() as stack:
        launch = launcher(stack, folder)
        yield launch(*paths, "--mode=release", "--controller=static", "--ramp-budget=100")


def samples_of(name: str, bundle: Bundle, folder: Path) -> tuple[Samples, Array]:
    """Samples of a task, none of which is as sure as a threshold, and which agree with the end."""
    _, data, _ = TASKS[name]
    inputs = data(1000, seed=23)
    said, ends = answers(bundle, inputs), unmodified(name, folder, inputs)
    exits, wanted = np.full(len(ends), -1), ends.copy()
    clear = np.ones(len(ends), np.bool_)
    for active in bundle.policy.active[::-1]:
        exit_ = bundle.manifest.exits[active.exit]
        confidence = said[exit_.confidence]
        clear &= np.abs(confidence - active.threshold) > SINGLE.batches
        leaves = confidence >= active.threshold
        exits[leaves], wanted[leaves] = active.exit, said[exit_.output][leaves]
    (places,) = np.nonzero(clear)
    every = Samples(inputs=inputs, exits=exits, answers=wanted).part(places)
    return every, AGREE[name](every.answers, ends[places], every.inputs)


def ask_ours(server: Server, name: str, inputs: Arrays) -> tuple[Array, Array]:
    with Client(server.address) as client:
        result = client.infer(name, inputs)
    assert not result.forced.any()
    (answer,) = result.outputs.values()
    return answer, result.exits


def ask_triton(server: Server, name: str, inputs: Arrays) -> tuple[Array, Array]:
    with triton.InferenceServerClient(server.address) as client:
        (output,) = client.get_model_metadata(name).outputs
        result = client.infer(name, triton_inputs(inputs))
    exits = result.get_response().parameters["offramp_exits"].string_param
    return result.as_numpy(output.name), np.array(exits.split(","), np.int32)


def counted(server: Server, name: str, samples: int) -> Counts:
    """Return the counts after the given number of samples, including copies, has finished."""

    def seen(word: str) -> float:
        return server.metric(f"offramp_{word}_total", model=name)

    wait_until(lambda: seen("observed") + seen("discounted_samples") == samples)
    assert server.metric("offramp_lost_feedback_total", model=name) == 0
    return Counts(
        audited=server.metric("offramp_audited_total", model=name),
        disagreed=server.metric("offramp_disagreed_total", model=name),
    )


@pytest.fixture(scope="module")
def asked(server: Server, bundles: dict[str, Bundle], folder: Path) -> Callable[[str], Asked]:
    """Ask both clients in turn about samples of a task, once."""

    @functools.cache
    def ask(name: str) -> Asked:
        every, agree = samples_of(name, bundles[name], folder / name)
        early = every.exits >= 0
        found, counts = [], []
        for kind in (~early, early & agree, early & ~agree):
            (places,) = np.nonzero(kind)
            assert len(places), "there are samples of every kind"
            for request in range(REQUESTS):
                part = every.part(np.resize(places, (REQUESTS, BATCH))[request])
                client = (ask_ours, ask_triton)[request % 2]
                found.append((part, *client(server, name, part.inputs)))
            counts.append(counted(server, name, len(found) * BATCH))
        return Asked(found=found, agreeing=counts[1], all=counts[2])

    return ask


@pytest.mark.parametrize("name", TASKS)
def test_answers_are_those_of_exits_and_of_the_unmodified_model(
    name: str, bundles: dict[str, Bundle], asked: Callable[[str], Asked]
) -> None:
    dtype, shape = SHAPES[name]
    told = set()
    for part, answer, exits in asked(name).found:
        assert answer.dtype == dtype
        assert answer.shape == (BATCH, *shape)
        assert exits.tolist() == part.exits.tolist()
        check_equal(answer, part.answers)
        told.update(exits.tolist())
    assert told == {-1, *(active.exit for active in bundles[name].policy.active)}


@pytest.mark.parametrize("name", TASKS)
def test_audits_count_what_the_task_calls_agreement(
    name: str, asked: Callable[[str], Asked]
) -> None:
    told = asked(name)
    assert told.agreeing.audited > 0
    assert told.agreeing.disagreed == 0
    assert told.all.disagreed > 0
    assert told.all.disagreed == told.all.audited - told.agreeing.audited


@pytest.mark.parametrize("name", TASKS)
def test_the_promise_is_told_and_what_it_is_about(
    name: str, server: Server, bundles: dict[str, Bundle]
) -> None:
    promise = bundles[name].policy.promise
    assert promise is not None
    for metric, wanted in (
        ("max_disagreement_ratio", TASKS[name][2]["max_disagreement"]),
        ("confidence_ratio", 0.95),
        ("certify_samples", promise.certify_samples),
        ("certify_errors", promise.certify_errors),
    ):
        assert server.metric(f"offramp_promise_{metric}", model=name) == wanted
    (section,) = (
        part
        for part in html.unescape(server.get("/")).split("<section>")[1:]
        if part.lstrip().startswith(f"<h2>{name} ")
    )
    assert (f"An answer agrees where {WORDS.get(name)}." in section) == (name in WORDS)
    assert ("An answer agrees where" in section) == (name in WORDS)
    assert f"<b>{100 * promise.max_disagreement:.3g} %</b> constraint" in section
