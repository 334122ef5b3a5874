"""Bridges compared with a network's own torch modules, joined by hand: the OCRNet of PAME 5.1.

The head reads the ends of two regions, so after the third region two tensors carry everything, and
every bridge has to produce both.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from tests.integration.test_tasks import compiled, with_all_exits
from tests.padded import Arrays, answers
from tests.sliced import slice_proto
from torch import Tensor, nn
from torch.nn import functional

from offramp.compiler.cuts.slicing import Sliced
from offramp.compiler.exits.bridges import Bridge, bridges_of
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.graphs.assembly import assemble
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import make_plan

SHAPES = ((8, 1), (16, 2), (24, 1), (32, 1))
"""Channels and stride of each region's first block."""
BLOCKS = (2, 3, 4, 4)


class RegionBlock(nn.Module):
    def __init__(self, before: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(before, width, 3, stride, 1),
            nn.Conv2d(width, width, 3, 1, 1),
        )
        same = before == width and stride == 1
        self.short = nn.Identity() if same else nn.Conv2d(before, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.short(x))


class TwoRegions(nn.Module):
    """Four regions; the head joins what the third and the fourth give."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, SHAPES[0][0], 3, 1, 1)
        before, regions = SHAPES[0][0], []
        for (width, stride), count in zip(SHAPES, BLOCKS, strict=True):
            blocks = [RegionBlock(before, width, stride)]
            blocks += [RegionBlock(width, width) for _ in range(count - 1)]
            regions.append(nn.ModuleList(blocks))
            before = width
        self.regions = nn.ModuleList(regions)
        self.third, self.fourth = nn.Conv2d(24, 16, 3, 1, 1), nn.Conv2d(32, 16, 3, 1, 1)
        self.out = nn.Conv2d(32, 5, 1)

    def head(self, third: Tensor, fourth: Tensor) -> Tensor:
        joined = torch.cat([torch.relu(self.third(third)), torch.relu(self.fourth(fourth))], 1)
        return functional.interpolate(self.out(joined), scale_factor=2.0)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.relu(self.stem(image))
        third = x
        for number, region in enumerate(self.regions):
            for block in region:
                x = block(x)
            third = x if number == 2 else third
        return self.head(third, x)

    def early(self, image: Tensor, blocks: int) -> Tensor:
        """Run so many blocks, then the first of every later region, and the head (PAME 5.1).

        What the stem gives has the shape of the first region, and is of it.
        """
        x, done = torch.relu(self.stem(image)), 0
        third = x
        for number, region in enumerate(self.regions):
            for place, block in enumerate(region):
                if done < blocks or (place == 0 and number > 0):
                    x = block(x)
                done += 1
            third = x if number == 2 else third
        return self.head(third, x)


class Made(NamedTuple):
    network: TwoRegions
    proto: onnx.ModelProto
    pieces: Sliced
    bridges: list[Bridge]


def network() -> TwoRegions:
    torch.manual_seed(0)
    return TwoRegions().eval()


def exported() -> onnx.ModelProto:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network(), (torch.randn(2, 3, 16, 16),), buffer, dynamo=False, opset_version=17,
            input_names=["image"], output_names=["pixels"],
            dynamic_axes={"image": {0: "batch"}, "pixels": {0: "batch"}},
        )  # fmt: skip
    return onnx.load_from_string(buffer.getvalue())


@pytest.fixture(scope="module")
def made() -> Made:
    proto = exported()
    pieces = slice_proto(proto)
    return Made(network(), proto, pieces, bridges_of(pieces))


def test_untrained_bridges_are_the_networks_own_blocks(made: Made) -> None:
    """Each cut tensor is that of a number of blocks; the bridge's answer is what follows of it."""
    image = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    written = {name for segment in made.pieces.segments[:-1] for name in segment.outputs}
    compared: set[int] = set()
    seen: set[int] = set()
    for bridge in made.bridges:
        names = [name for name in bridge.reads if name in written]
        if len(names) > 1 or bridge.candidate in seen:
            continue  # of each candidate the first is whole, the other leaves the last block out
        seen.add(bridge.candidate)
        tensors = assemble(made.pieces.graphs, [*names, made.pieces.model.answer.output])
        (cut, _) = ort.InferenceSession(tensors).run(None, {"image": image.numpy()})
        blocks = blocks_until(made.network, image, cut)
        session = ort.InferenceSession(bridge.proto.SerializeToString())
        (found,) = session.run([bridge.scores], {names[0]: cut})
        with torch.no_grad():
            expected = made.network.early(image, blocks).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        compared.add(blocks)
    assert len(compared) >= 6, "before the set, nearly every block has a bridge"


def blocks_until(net: TwoRegions, image: Tensor, cut: np.ndarray) -> int:
    """Find after how many blocks a tensor is what the network has there."""
    with torch.no_grad():
        x = torch.relu(net.stem(image))
        if x.shape == cut.shape and np.allclose(x.numpy(), cut, atol=1e-4):
            return 0
        for done, block in enumerate((b for region in net.regions for b in region), 1):
            x = block(x)
            if x.shape == cut.shape and np.allclose(x.numpy(), cut, atol=1e-4):
                return done
    raise AssertionError("no block gives it")


def test_after_the_third_region_bridges_read_both_tensors(made: Made) -> None:
    sets = [cut for cut in made.pieces.analysis.cuts if cut.beside]
    assert sets
    found = {(c.shape[1], *(b.shape[1] for b in c.beside)) for c in sets}
    assert found <= {(32, 24), (32, 16)}, (
        "the fourth region's, and the third's or what is made of it"
    )
    of_sets = [b for b in made.bridges if len(made.pieces.cuts[b.candidate].tensors) > 1]
    assert of_sets
    assert all(len(bridge.reads) == 2 for bridge in of_sets)


def test_such_bridges_are_compiled_and_served(tmp_path: Path) -> None:
    """With a cut at a set: what an exit there answers is what its graph does, batch by batch."""

    def images(samples: int, *, seed: int = 0) -> Arrays:
        rng = np.random.default_rng(seed)
        return {"image": rng.standard_normal((samples, 3, 16, 16)).astype(np.float32)}

    asked = {"agree_share": 0.1, "max_disagreement": 0.4, "exits": ("90%",), "candidates": 12}
    bundle = compiled(exported, images, tmp_path, **asked)
    (exit_,) = bundle.manifest.exits
    assert exit_.head.kind == "bridge"
    assert len(exit_.inputs) == 2
    unseen = images(24, seed=5)
    served = with_all_exits(bundle, unseen, tmp_path / "all.ee")
    said, left = answers(bundle, unseen), 0
    pipeline = Pipeline(OnnxRuntimeBackend(threads=1), make_plan(served))
    for part in pipeline.run(pipeline.backend.open_slot(), unseen):
        wanted = said[exit_.output if part.stage == 0 else bundle.manifest.answer.output]
        np.testing.assert_allclose(part.answer, wanted[part.rows], rtol=1e-4, atol=1e-4)
        left += len(part.rows) if part.stage == 0 else 0
    assert 0 < left < 24
