"""The elastic example: its subnets, its training, and what is written of it."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from offramp.supernet.training import ElasticModule, extract
from offramp.tools.zoo import elastic_resnet
from offramp.tools.zoo.elastic_resnet import (
    Training,
    elastic_space,
    make_supernet,
    measure,
    multiplications,
    uniform_choices,
)
from offramp.tools.zoo.small_models import Parts, Samples


def bright_or_dark(count: int = 64) -> Samples:
    """Images of two classes that a mean tells apart."""
    random = np.random.default_rng(0)
    labels = np.arange(count) % 2
    images = random.integers(0, 100, (count, 1, 28, 28)) + 150 * labels[:, None, None, None]
    return Samples(inputs={"image": images.astype(np.uint8)}, labels=labels)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[], ElasticModule]:
    """Makes the same net with fewer channels.

    A quarter of them is two: with one, channels last, oneDNN of torch 2.13 wrote out of bounds on a
    CPU with AVX2 alone.
    """
    monkeypatch.setattr(elastic_resnet, "CHANNELS", (8, 8, 8))
    return lambda: make_supernet(0)


def options_of(epochs: int, state: Path | None = None) -> argparse.Namespace:
    """Return the training options of the command line."""
    return argparse.Namespace(epochs=epochs, batch_size=16, seed=0, state=state)


def test_the_net_is_small_enough_to_ship_and_its_subnets_span_a_tenth_of_its_work() -> None:
    supernet = make_supernet(0)
    space = supernet.space
    assert sum(weights.numel() for weights in supernet.parameters()) == 2_048_106
    assert len(list(space.choices())) == 1_728
    whole, least = (
        multiplications(extract(supernet, choice), supernet)
        for choice in (space.largest(), space.smallest())
    )
    first = 28 // 2 * 28 // 2 * 9 * 32  # the stem, of one input channel
    block = 28 // 2 * 28 // 2 * 9 * 32 * 32  # a convolution at the first resolution
    assert whole > first + 6 * block
    assert least / whole < 0.12


def test_three_depths_and_three_widths_are_measured() -> None:
    choices = uniform_choices(elastic_space())
    assert len(set(choices)) == 9
    assert choices[0] == elastic_space().largest()
    assert choices[-1] == elastic_space().smallest()


def test_a_small_one_learns_and_its_subnets_are_measured(
    small: Callable[[], ElasticModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    supernet, samples = small(), bright_or_dark()
    Training(supernet, len(samples), options_of(epochs=8)).run(samples)
    supernet.eval()
    rows = measure(supernet, samples, samples)
    assert [row["skipped"] for row in rows[::3]] == [(0, 0, 0), (1, 1, 1), (2, 2, 2)]
    assert min(row["test_accuracy"] for row in rows) > 0.9
    work = [row["multiplications"] for row in rows]
    assert work[0] == max(work)
    assert work[-1] == min(work)
    # Its own statistics and those of the largest are one for the largest.
    assert rows[0]["test_accuracy"] == rows[0]["test_accuracy_without_norms_of_its_own"]


def test_training_that_was_cut_off_goes_on_as_if_nothing_had_been(
    small: Callable[[], ElasticModule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, kept = bright_or_dark(), options_of(3, tmp_path / "state.pt")
    whole = small()
    Training(whole, len(samples), options_of(3)).run(samples)

    class CutOffError(Exception):
        pass

    epoch = Training._epoch

    def until_the_third(training: Training, *given: torch.Tensor) -> None:
        if training.epochs_done == 2:
            raise CutOffError
        epoch(training, *given)

    monkeypatch.setattr(Training, "_epoch", until_the_third)
    with pytest.raises(CutOffError):
        Training(small(), len(samples), kept).run(samples)
    monkeypatch.setattr(Training, "_epoch", epoch)
    resumed = Training(small(), len(samples), kept)
    assert resumed.epochs_done == 2
    resumed.run(samples)
    for name, weights in whole.state_dict().items():
        assert torch.equal(resumed.supernet.state_dict()[name], weights), name


def test_everything_is_written_and_a_state_saves_training_again(
    small: Callable[[], ElasticModule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = bright_or_dark(32)
    parts = Parts(train=samples, calibration=samples, test=samples)
    monkeypatch.setattr(elastic_resnet, "read_images", lambda options: parts)
    arguments = ["x", "--output", str(tmp_path / "out"), "--epochs", "1", "--batch-size", "16"]
    arguments += ["--threads", "1", "--state", str(tmp_path / "state.pt")]
    monkeypatch.setattr(sys, "argv", arguments)

    def run() -> tuple[bytes, ...]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's exporter warns of itself
            elastic_resnet.main()
        names = ("elastic_resnet.onnx", "spec.toml", "training.json")
        return tuple((tmp_path / "out" / name).read_bytes() for name in names)

    first = run()
    monkeypatch.setattr(Training, "_epoch", None)
    assert run() == first
    facts = json.loads(first[2])
    assert (facts["epochs"], facts["training_images"], len(facts["measured"])) == (1, 32, 9)
