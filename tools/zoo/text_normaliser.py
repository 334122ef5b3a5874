"""Train a small encoder-decoder that rewrites dates, times, amounts and telephone numbers.

It generates text: the canonical form of a sentence (:mod:`offramp.tools.zoo.messy_text`), token by
token. The encoder has 3 layers and the decoder 8, all 128 wide; tokens are digits, punctuation, and
characters and frequent pieces of words. Writes into ``--output`` a folder for each of ``--only``:

- ``joint``: the model, trained with an exit after each decoder layer. All exits share the final
  norm and the LM head, and deeper exits weigh more in the loss (CALM).
- ``plain``: the same model, trained as usual.
- ``layers_3``, ``layers_4``: controls, decoders of 3 and 4 layers, trained as usual.

A folder has ``encoder_model.onnx``, ``decoder_model.onnx`` and ``decoder_with_past_model.onnx``;
``tokenizer.json`` (package ``tokenizers``, ``pip install 'offramp[text]'``) and
``generation_config.json``; ``calibration.npz`` and ``test.npz`` with 4,000 and 1,000 prompts that
were not used for training (int64 ``input_ids`` and ``attention_mask``, and as ``label`` the
canonical form, padded with 0); and ``training.json``. Each takes 13.5 minutes of processor time::

    python -m offramp.tools.zoo.text_normaliser --output demo/normaliser
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional

from offramp.tools.zoo.autocast import bfloat16_pays
from offramp.tools.zoo.encoder_decoder import (
    END,
    FILES,
    PADDING,
    START,
    UNKNOWN,
    EncoderDecoder,
    export,
    greedy,
    greedy_of_files,
)
from offramp.tools.zoo.messy_text import Phrase, draw_pairs
from offramp.tools.zoo.small_models import Parts, Samples

TOKENS, VOCABULARY = 96, 384
"""Largest number of tokens in a prompt and in an output, with its end; size of the vocabulary."""
SPECIAL = {"<pad>": PADDING, "<s>": START, "</s>": END, "<unk>": UNKNOWN}
CONTROLS = {"layers_3": 3, "layers_4": 4}
MODELS = ("joint", "plain", *CONTROLS)
_TRAINED, _CALIBRATED, _TESTED = 120_000, 4_000, 1_000
_BATCH, _POOL = 32, 50
"""Sentences per batch; batches per pool, in which sentences of similar length are put together."""
_RATE = 2e-3
"""Peak learning rate; it falls with the time that is left."""
_COMPARED = 200
"""Prompts on which the ONNX files are compared with torch."""


def make_tokenizer(pairs: Sequence[Phrase]) -> Tokenizer:
    """Return a tokenizer (BPE) that learned its pieces from both texts of the pairs.

    Pieces do not cross words; a space before a word is part of it. Each digit and punctuation mark
    is a token.
    """
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(" ?[A-Za-z]+|."), "isolated")
    made.decoder = decoders.Fuse()
    learner = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), show_progress=False
    )
    made.train_from_iterator((text for pair in pairs for text in pair), learner)
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", END)]
    )
    return made


def draw_parts(
    seed: int,
    *,
    trained: int = _TRAINED,
    calibrated: int = _CALIBRATED,
    tested: int = _TESTED,
) -> tuple[Parts, Tokenizer]:
    """Return sentences as tokens, in disjoint parts of given sizes, and the tokenizer."""
    count = trained + calibrated + tested
    # Draw more, because some sentences have too many tokens.
    pairs = draw_pairs(count + count // 100 + 1, seed=seed)
    tokenizer = make_tokenizer(pairs[: trained // 4])
    found = [
        [tokens.ids for tokens in tokenizer.encode_batch([pair[side] for pair in pairs])]
        for side in range(2)
    ]
    kept = [both for both in zip(*found, strict=True) if max(map(len, both)) <= TOKENS][:count]
    prompts, labels = (padded([both[side] for both in kept]) for side in range(2))
    mask = (prompts != PADDING).astype(np.int64)
    samples = Samples(inputs={"input_ids": prompts, "attention_mask": mask}, labels=labels)
    return Parts(
        train=samples[:trained],
        calibration=samples[trained : trained + calibrated],
        test=samples[trained + calibrated :],
    ), tokenizer


def padded(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return rows of tokens as one array int64 [rows, TOKENS], padded at the end."""
    found = np.full((len(rows), TOKENS), PADDING, np.int64)
    for place, row in zip(found, rows, strict=True):
        place[: len(row)] = row
    return found


def loss_of_last(model: EncoderDecoder, states: list[Tensor], wanted: Tensor) -> Tensor:
    """Return the mean loss at the model's end; padding does not count."""
    logits = model.logits(states[-1])
    return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=PADDING)


def loss_of_exits(model: EncoderDecoder, states: list[Tensor], wanted: Tensor) -> Tensor:
    """Return the mean of the losses after each layer, weighted by the layer's number (CALM)."""
    logits = model.logits(torch.stack(states))
    weights = torch.arange(1.0, len(states) + 1)
    losses = functional.cross_entropy(
        logits.flatten(0, 2), wanted.expand(len(states), -1, -1).flatten(), reduction="none",
        ignore_index=PADDING,
    ).view(len(states), -1)  # fmt: skip
    return (losses.sum(1) / (wanted != PADDING).sum() * weights).sum() / weights.sum()


Loss = Callable[[EncoderDecoder, list[Tensor], Tensor], Tensor]


def train(
    model: EncoderDecoder,
    samples: Samples,
    loss_of: Loss,
    *,
    limit_s: float,
    steps: int | None = None,
    seed: int = 0,
) -> int:
    """Train in place for some seconds of processor time, and return the steps.

    Args:
        model: Model to train with teacher forcing.
        samples: Prompts and canonical forms.
        loss_of: Loss of the states after each layer, given the target tokens.
        limit_s: Seconds of processor time per thread, so that other processes have little effect.
        steps: Largest number of steps, if the time allows more.
        seed: Seed of the order of samples.
    """
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    limit_s *= torch.get_num_threads()
    begun, done, recent = time.process_time(), 0, 0.0
    model.train()
    for prompts, mask, labels in _batches(samples, torch.Generator().manual_seed(seed)):
        progress = max((time.process_time() - begun) / limit_s, done / steps if steps else 0)
        if progress >= 1:
            break
        for group in optimiser.param_groups:
            group["lr"] = _RATE * min(1.0, (done + 1) / 200) * (1 - progress)
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16_pays()):
            encoded = model.cross(model.encode(prompts, mask))
            tokens = functional.pad(labels[:, :-1], (1, 0), value=START)
            places = torch.arange(tokens.shape[1]).expand_as(tokens)
            # Padding is at the end, and no real token attends to it.
            seen = torch.ones_like(tokens)
            states, _ = model.decode(tokens, places, seen, mask, encoded)
            loss = loss_of(model, states, labels)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        done += 1
        recent = loss.item() if done == 1 else 0.98 * recent + 0.02 * loss.item()
        if done % 200 == 0:
            print(f"step {done}  loss {recent:.4f}  {progress:.0%}", flush=True)
    model.eval()
    return done


def _batches(samples: Samples, generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
    """Yield prompts, masks and labels, cropped to the longest of their batch, without an end."""
    tensors = (*samples.tensors(), torch.from_numpy(samples.labels))
    lengths = (tensors[2] != PADDING).sum(1)
    while True:
        order = torch.randperm(len(samples), generator=generator)
        for pool in torch.split(order, _BATCH * _POOL):
            batches = torch.split(pool[lengths[pool].argsort()], _BATCH)
            for number in torch.randperm(len(batches), generator=generator).tolist():
                batch = (tensor[batches[number]] for tensor in tensors)
                yield tuple(rows[:, : int((rows != PADDING).sum(1).max())] for rows in batch)


def outputs_of(model: EncoderDecoder, samples: Samples) -> NDArray[np.int64]:
    """Return greedy outputs int64 [samples, TOKENS], padded after their end."""
    found = np.full((len(samples), TOKENS), PADDING, np.int64)
    for start in range(0, len(samples), 250):
        part = greedy(model, *samples[start : start + 250].tensors(), most=TOKENS)
        found[start : start + 250, : part.shape[1]] = part
    return found


def same(outputs: NDArray[np.int64], others: NDArray[np.int64]) -> float:
    """Return the share of outputs that are the same, token by token to the end."""
    return float((outputs == others).all(axis=1).mean())


def write(
    folder: Path, model: EncoderDecoder, parts: Parts, tokenizer: Tokenizer, facts: dict[str, Any]
) -> None:
    """Write a folder as the module describes it.

    Raises:
        SystemExit: More than 1 % of outputs differ between ONNX Runtime and torch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    export(model, folder)
    outputs = outputs_of(model, parts.test)
    ids, mask = (array[:_COMPARED] for array in parts.test.inputs.values())
    run = greedy_of_files(folder, ids, mask, most=TOKENS)
    equal = same(np.pad(run, ((0, 0), (0, TOKENS - run.shape[1]))), outputs[:_COMPARED])
    if equal < 0.99:
        raise SystemExit(
            f"{1 - equal:.1%} of outputs of the ONNX files in {folder} differ from those of torch, "
            "at most 1 % should: the export is wrong"
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "decoder_start_token_id": START,
        "eos_token_id": END,
        "pad_token_id": PADDING,
        "max_length": TOKENS,
    }
    (folder / "generation_config.json").write_text(json.dumps(config, indent=2) + "\n")
    parts.calibration.save(folder / "calibration.npz")
    parts.test.save(folder / "test.npz")
    accuracy = same(outputs, parts.test.labels)
    facts |= {
        "decoder_layers": len(model.decoder),
        "parameters": sum(weights.numel() for weights in model.parameters()),
        "vocabulary": tokenizer.get_vocab_size(),
        "onnx_bytes": {name: (folder / name).stat().st_size for name in FILES},
        "training_samples": len(parts.train),
        "calibration_samples": len(parts.calibration),
        "test_samples": len(parts.test),
        "mean_output_tokens": float((outputs != PADDING).sum(axis=1).mean()),
        "test_accuracy_of_whole_outputs": accuracy,
        "same_in_onnx_runtime": equal,
        "torch": torch.__version__,
    }
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(f"{folder.name}: {accuracy:.1%} of whole outputs right", flush=True)


def trained(
    parts: Parts, options: argparse.Namespace
) -> Iterator[tuple[str, EncoderDecoder, dict[str, Any]]]:
    """Train models one by one, and yield each with its name and the facts of its training."""
    torch.set_num_threads(options.threads)
    for name in options.only:
        torch.manual_seed(options.seed)
        model = EncoderDecoder(vocabulary=VOCABULARY, depth=CONTROLS.get(name, 8))
        loss_of = loss_of_exits if name == "joint" else loss_of_last
        yield name, model, _timed(options, name, model, parts, loss_of)


def _timed(
    options: argparse.Namespace, name: str, model: EncoderDecoder, parts: Parts, loss_of: Loss
) -> dict[str, Any]:
    begun, begun_cpu = time.monotonic(), time.process_time()
    limit_s = 60 * options.minutes
    done = train(
        model, parts.train, loss_of, limit_s=limit_s, steps=options.steps, seed=options.seed
    )
    return {
        "model": name,
        "task": "canonical forms of dates, times, amounts and telephone numbers in sentences",
        "steps": done,
        "batch_size": _BATCH,
        "training_seconds": round(time.monotonic() - begun),
        "training_cpu_seconds": round(time.process_time() - begun_cpu),
        "threads": options.threads,
        "bfloat16": bfloat16_pays(),
        "seed": options.seed,
    }


def make(options: argparse.Namespace) -> None:
    """Draw the sentences, train, and write."""
    parts, tokenizer = draw_parts(options.seed)
    for name, model, facts in trained(parts, options):
        write(options.output / name, model, parts, tokenizer, facts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of training and of the files to write."""
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS[:1]))
    parser.add_argument(
        "--minutes", type=float, default=13.5, help="minutes of processor time for training"
    )
    parser.add_argument("--steps", type=int, help="largest number of training steps for each model")
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads of torch during training"
    )
    parser.add_argument("--seed", type=int, default=0)


def main() -> None:
    """Train, export, and write the prompts."""
    parser = argparse.ArgumentParser(description="Train a small model that normalises text.")
    add_arguments(parser)
    make(parser.parse_args())


if __name__ == "__main__":
    main()
