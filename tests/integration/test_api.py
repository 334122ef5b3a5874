"""Torch modules compiled by the API, and served in this process as ``eeserve`` serves them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.bundles import equal_times
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offramp
from offramp.client import Client

CLASSES, KINDS = 4, 12


def encoder(width: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


class SmallViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 4, stride=4)
        self.places = nn.Parameter(torch.randn(16, 16) * 0.1)
        self.layers, self.head = encoder(16), nn.Linear(16, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2) + self.places
        logits: Tensor = self.head(self.layers(x).mean(1))
        return logits


class SmallText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 16)
        self.layers, self.head = encoder(16), nn.Linear(16, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.layers(self.words(input_ids), src_key_padding_mask=attention_mask == 0)
        kept = attention_mask[..., None].to(x.dtype)
        return {"logits": self.head((x * kept).sum(1) / kept.sum(1))}


def images(samples: int, seed: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    kinds = torch.randn(KINDS, 1, 16, 16, generator=torch.Generator().manual_seed(99))
    which = torch.randint(KINDS, (samples,), generator=drawn)
    noise = torch.randn(samples, 1, 16, 16, generator=drawn)
    return {"image": kinds[which] + 4 * noise, "labels": which % CLASSES}


def texts(samples: int, seed: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    which = torch.randint(KINDS, (samples,), generator=drawn)
    ids = which[:, None] * 8 + torch.randint(8, (samples, 12), generator=drawn) + 1
    mask = (torch.arange(12) < torch.randint(6, 13, (samples, 1), generator=drawn)).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": which % CLASSES}


def train(module: nn.Module, samples: dict[str, Tensor]) -> None:
    torch.set_num_threads(1)  # two would wait for each other where tests share the cores
    labels = samples["labels"]
    inputs = [value for name, value in samples.items() if name != "labels"]
    optimiser = torch.optim.AdamW(module.parameters(), 3e-3)
    for step in range(60):
        rows = slice(step % 8 * 128, step % 8 * 128 + 128)
        answer = module(*(each[rows] for each in inputs))
        logits = answer if isinstance(answer, Tensor) else answer["logits"]
        optimiser.zero_grad()
        nn.functional.cross_entropy(logits, labels[rows]).backward()
        optimiser.step()


@contextmanager
def eeserve(bundle: Path) -> Iterator[str]:
    """The command in a process of its own; yields the address of its gRPC port."""
    command = [sys.executable, "-m", "offramp.server.cli", str(bundle), "--mode", "leave"]
    command += ["--grpc-port", "0", "--http-port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            yield next(found[1] for line in lines if (found := re.search(r"gRPC on (\S+),", line)))
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


@pytest.mark.parametrize(("kind", "made"), [(SmallViT, images), (SmallText, texts)])
def test_a_compiled_module_answers_in_this_process_as_eeserve_does(
    kind: type[nn.Module], made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = kind()
    train(module, made(1024, 0))
    module.train()
    samples = made(1600, 1)
    if kind is SmallViT:
        loader: DataLoader[Any] = DataLoader(TensorDataset(*samples.values()), batch_size=100)
    else:
        rows = [{n: v[i] for n, v in samples.items()} for i in range(len(samples["labels"]))]
        loader = DataLoader(rows, batch_size=100)  # type: ignore[arg-type] # of mappings
    with equal_times():
        bundle = offramp.compile(
            module, loader, max_disagreement=0.05, candidates=2, epochs=4, augment="off"
        )
    assert module.training
    assert bundle.path == Path(f"{kind.__name__}.ee")
    assert bundle.policy.active
    fresh = {n: v.numpy() for n, v in made(300, 2).items() if n != "labels"}
    batches = [{n: v[i : i + 25] for n, v in fresh.items()} for i in range(0, 300, 25)]
    with offramp.load(bundle.path, mode="leave", state=False) as model:
        here = [model.predict(batch) for batch in batches]
    with eeserve(bundle.path.resolve()) as address, Client(address) as client:
        there = [client.infer(kind.__name__, batch) for batch in batches]
    exits = np.concatenate([result.exits for result in here])
    assert -1 in exits
    assert (exits >= 0).any()
    for mine, theirs in zip(here, there, strict=True):
        assert list(mine.outputs) == list(theirs.outputs)
        for name, array in theirs.outputs.items():
            assert np.array_equal(mine.outputs[name], array)
        assert np.array_equal(mine.exits, theirs.exits)
        # Six digits of it go over the wire.
        np.testing.assert_allclose(mine.confidences, theirs.confidences, rtol=0, atol=1e-6)
    check_against_module(module, fresh, here)


def check_against_module(
    module: nn.Module, inputs: dict[str, NDArray[Any]], results: list[Any]
) -> None:
    """Samples that ran to the end have the module's own answer, up to rounding."""
    module.eval()
    with torch.no_grad():
        answer = module(**{n: torch.from_numpy(v) for n, v in inputs.items()})
    (wanted,) = [answer] if isinstance(answer, Tensor) else answer.values()
    found = np.concatenate([next(iter(result.outputs.values())) for result in results])
    ends = np.concatenate([result.exits for result in results]) < 0
    np.testing.assert_allclose(found[ends], wanted.numpy()[ends], rtol=1e-3, atol=1e-3)
