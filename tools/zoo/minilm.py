"""MiniLM (Wang et al. 2020): a BERT of 6 layers, 384 wide, with a classifier on top.

Written out in plain torch, so that the weights of ``sentence-transformers/all-MiniLM-L6-v2`` can
be fine-tuned and exported without the transformers library. ``minilm_sentiment`` does both.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

VOCABULARY, POSITIONS, WIDTH, HEADS, LAYERS = 30_522, 512, 384, 12, 6
EPSILON = 1e-12
MASKED = -10_000.0
"""Value added to the scores of padding: BERT's choice; also finite in bfloat16 and float16."""

OURS_FOR_THEIRS = (
    ("encoder.layer.", "layers."),
    ("attention.self.", ""),
    ("attention.output.dense", "mix"),
    ("attention.output.LayerNorm", "attention_norm"),
    ("intermediate.dense", "expand"),
    ("output.dense", "contract"),
    ("output.LayerNorm", "output_norm"),
    ("embeddings.LayerNorm", "norm"),
    ("embeddings.word_embeddings", "words"),
    ("embeddings.position_embeddings", "positions"),
)
"""Replacements, in this order, from the checkpoint's names to ours."""


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward block, each with a shortcut and a norm after it."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.attention_norm = nn.LayerNorm(WIDTH, EPSILON)
        self.expand = nn.Linear(WIDTH, 4 * WIDTH)
        self.contract = nn.Linear(4 * WIDTH, WIDTH)
        self.output_norm = nn.LayerNorm(WIDTH, EPSILON)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return the output for x [batch, sequence, width] and bias [batch, 1, 1, sequence]."""
        x = self.attention_norm(x + self.mix(self.attend(x, bias)))
        y: Tensor = self.output_norm(x + self.contract(functional.gelu(self.expand(x))))
        return y

    def attend(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return the attention of all heads, [batch, sequence, width], before output projection."""
        batch, sequence = x.shape[:2]
        width = WIDTH // HEADS

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, sequence, HEADS, width).transpose(1, 2)

        query, key, value = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        scores = query @ key.transpose(2, 3) / math.sqrt(width) + bias
        attended = functional.softmax(scores, dim=3) @ value
        return attended.transpose(1, 2).reshape(batch, sequence, WIDTH)


class MiniLM(nn.Module):
    """Converts token ids to one vector per token, [batch, sequence, 384]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, EPSILON)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode int64 [batch, sequence]; mask: 1 for tokens, 0 for padding."""
        bias = (1.0 - attention_mask[:, None, None, :].float()) * MASKED
        x: Tensor = self.norm(self.words(input_ids) + self.positions.weight[: input_ids.shape[1]])
        for layer in self.layers:
            x = layer(x, bias)
        return x

    def load(self, path: Path) -> None:
        """Load a BERT checkpoint of these dimensions.

        Every text is a first sentence here, so the embedding of this token type is constant; it is
        added to the positions. The checkpoint's pooler is not used.

        Args:
            path: A safetensors file with Hugging Face's names.

        Raises:
            RuntimeError: A weight is missing, left over or of another shape.
        """
        theirs = load_file(path)
        theirs.pop("embeddings.position_ids", None)
        token_types = theirs.pop("embeddings.token_type_embeddings.weight")
        ours = {}
        for name, weight in theirs.items():
            renamed = name
            for their_part, our_part in OURS_FOR_THEIRS:
                renamed = renamed.replace(their_part, our_part)
            if not name.startswith("pooler."):
                ours[renamed] = weight
        ours["positions.weight"] = ours["positions.weight"] + token_types[0]
        self.load_state_dict(ours)


class SentimentClassifier(nn.Module):
    """MiniLM, the mean over the tokens that are not padding, dropout, one linear layer."""

    def __init__(self, weights: Path, classes: int = 2) -> None:
        super().__init__()
        self.encoder = MiniLM()
        self.encoder.load(weights)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(WIDTH, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Classify int64 [batch, sequence]: logits [batch, classes]."""
        tokens = self.encoder(input_ids, attention_mask)
        kept = attention_mask[:, :, None].to(tokens.dtype)
        mean = (tokens * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1.0)
        logits: Tensor = self.classifier(self.dropout(mean))
        return logits


def batches_of_like_length(
    lengths: Tensor, batch_size: int, generator: torch.Generator
) -> list[Tensor]:
    """Split the samples into batches of near equal length, in random order.

    The samples are shuffled, sorted stably by length, and cut into batches. So samples of equal
    length are in different batches each epoch, and there is almost no padding.

    Args:
        lengths: int64 [n], tokens of each sample.
        batch_size: Samples of a batch; the longest ones may be fewer.
        generator: Random generator of the order.

    Returns:
        Indices of each batch, int64.
    """
    shuffled = torch.randperm(len(lengths), generator=generator)
    by_length = shuffled[lengths[shuffled].argsort(stable=True)]
    batches = torch.split(by_length, batch_size)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def train(
    model: nn.Module,
    input_ids: NDArray[np.int64],
    attention_mask: NDArray[np.int64],
    label: NDArray[np.uint8],
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    bfloat16: bool,
    seed: int,
) -> None:
    """Fine-tune in place with AdamW; the rate rises for a tenth of the steps, then falls to 0.

    Args:
        model: Module from ids and mask to logits.
        input_ids: [n, sequence], padded at the end.
        attention_mask: [n, sequence], 1 for tokens and 0 for padding.
        label: [n], the class of each sample.
        epochs: Passes over all samples.
        batch_size: Samples per step.
        learning_rate: Peak rate, after the warm-up.
        bfloat16: Multiply matrices in bfloat16 (autocast).
        seed: Seed of the order of the batches.
    """
    ids, mask = torch.from_numpy(input_ids), torch.from_numpy(attention_mask)
    truth, lengths = torch.from_numpy(label.astype(np.int64)), mask.sum(dim=1)
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.01, fused=True)
    steps = epochs * -(-len(ids) // batch_size)
    warm_up = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warm_up, (steps - step) / (steps - warm_up + 1))
    )
    model.train()
    started, recent, step = time.monotonic(), 0.0, 0
    for _ in range(epochs):
        for index in batches_of_like_length(lengths, batch_size, generator):
            longest = int(lengths[index].max())
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                logits = model(ids[index, :longest], mask[index, :longest])
                loss = functional.cross_entropy(logits.float(), truth[index])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            step += 1
            recent = loss.item() if step == 1 else 0.95 * recent + 0.05 * loss.item()
            if step % 25 == 0 or step == steps:
                seconds = time.monotonic() - started
                print(f"step {step}/{steps}  loss {recent:.3f}  {seconds:.0f} s", flush=True)


@torch.no_grad()
def logits_of(
    model: nn.Module, input_ids: NDArray[np.int64], attention_mask: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the logits of one batch in float32, [batch, classes]."""
    model.eval()
    logits: NDArray[np.float32] = model(
        torch.from_numpy(input_ids), torch.from_numpy(attention_mask)
    ).numpy()
    return logits


def export(model: nn.Module, path: Path) -> None:
    """Write the model with symbolic batch and sequence dimensions, opset 17."""
    axes = {0: "batch", 1: "sequence"}
    ids = torch.arange(14).view(2, 7)
    torch.onnx.export(
        model.eval(),
        (ids, torch.ones_like(ids)),
        str(path),
        input_names=["input_ids", "attention_mask"],
        output_names=["logits"],
        dynamic_axes={"input_ids": axes, "attention_mask": axes, "logits": {0: "batch"}},
        opset_version=17,
        dynamo=False,
    )
