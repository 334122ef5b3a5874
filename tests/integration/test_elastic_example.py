"""The shipped supernet: its spec fits it, and statistics of their own are what its subnets need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from offramp.calibration.data.dataset import Dataset, read_dataset
from offramp.compiler.frontend.model import read_model
from offramp.engine.backends.onnxruntime import make_session
from offramp.supernet.graphs import SubnetChoice, Supernet, laid_out, read_spec
from offramp.supernet.graphs.extract import extract_subnet
from offramp.supernet.graphs.norm import SubnetNorm

EXAMPLES = Path(__file__).parents[2] / "examples"
CHOICES = {
    "half as wide": SubnetChoice(skipped=(0, 0, 0), ratios=(0.5, 0.5, 0.5)),
    "the smallest": SubnetChoice(skipped=(2, 2, 2), ratios=(0.25, 0.25, 0.25)),
}


@pytest.fixture(scope="module")
def net() -> Supernet:
    """The example as the compiler takes it."""
    model = read_model(EXAMPLES / "elastic" / "elastic_resnet.onnx")
    return laid_out(Supernet.of(model, read_spec(EXAMPLES / "elastic" / "spec.toml")))


def images(net: Supernet, name: str, count: int) -> tuple[Dataset, NDArray[np.integer[Any]]]:
    """Some images of the other example, and their labels."""
    path = EXAMPLES / "fashion" / f"{name}.npz"
    dataset = read_dataset(path, net.model.inputs, answer=net.model.answer)
    with np.load(path) as arrays:
        return dataset.subset(np.arange(count)), arrays["label"][:count]


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_statistics_of_its_own_are_what_a_subnet_needs(net: Supernet, choice: SubnetChoice) -> None:
    test, labels = images(net, "test", 1000)
    calibration, _ = images(net, "calibration", 1000)

    def accuracy(norm: SubnetNorm | None) -> float:
        model = extract_subnet(net, choice, norm).proto.SerializeToString()
        (logits,) = make_session(model, 1).run(None, test.take(slice(None)))
        return float((logits.argmax(1) == labels).mean())

    facts = json.loads((EXAMPLES / "elastic" / "training.json").read_text())
    wanted = next(
        row["test_accuracy"]
        for row in facts["measured"]
        if (tuple(row["skipped"]), tuple(row["ratios"])) == (choice.skipped, choice.ratios)
    )
    # Of 1,000 instead of 4,000 images: accuracies differ by up to 2 points (two deviations).
    assert accuracy(SubnetNorm.of(net, calibration)) == pytest.approx(wanted, abs=0.02)
    assert accuracy(None) < 0.6
