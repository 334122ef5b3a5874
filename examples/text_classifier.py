"""A text classifier in torch, with a mask: trained, compiled with exits, and called.

    python -m examples.text_classifier

Takes some minutes, most of them for training. The reviews are made up by the program.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import offramp

GOOD = ("good", "great", "fine", "lovely", "superb")
BAD = ("bad", "awful", "poor", "dull", "dreadful")
OTHERS = ("the", "a", "film", "plot", "cast", "was", "is", "with", "and", "its", "score", "story")
WORDS = {word: number for number, word in enumerate(["<pad>", "not", *GOOD, *BAD, *OTHERS])}
TOKENS = 16


class Classifier(nn.Module):
    """Token ids and mask [b, 16] → logits [b, 2]."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), 32)
        self.places = nn.Parameter(0.1 * torch.randn(TOKENS, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(32, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Return logits by name, as the models of transformers do."""
        x = self.words(input_ids) + self.places
        x = self.layers(x, src_key_padding_mask=attention_mask == 0)
        kept = attention_mask[..., None].to(x.dtype)
        return {"logits": self.head((x * kept).sum(1) / kept.sum(1))}


def review(drawn: random.Random) -> tuple[str, int]:
    """Return an invented review, and 1 if it likes the film; "not" reverses the next word."""
    words, score = drawn.choices(OTHERS, k=drawn.randint(3, 11)), 0
    while score == 0:
        good, turned = drawn.random() < 0.5, drawn.random() < 0.3
        word = drawn.choice(GOOD if good else BAD)
        words += ["not", word] if turned else [word]
        score += 1 if good != turned else -1
    return " ".join(words), int(score > 0)


def tokenize(text: str) -> dict[str, Tensor]:
    """Return the ids of the words, padded, and a mask that is 1 for words."""
    ids = [WORDS[word] for word in text.split()][:TOKENS]
    mask = [1] * len(ids) + [0] * (TOKENS - len(ids))
    ids += [0] * (TOKENS - len(ids))
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def main(
    output: Path = Path("reviews.ee"),
    *,
    reviews: int = 16_000,
    layers: int = 8,
    max_disagreement: float = 0.01,
) -> offramp.Bundle:
    """Train on one half of the reviews, and compile with the other."""
    drawn = random.Random(0)
    made = [review(drawn) for _ in range(reviews)]
    rows = [{**tokenize(text), "labels": torch.tensor(liked)} for text, liked in made]
    model = Classifier(layers)
    optimiser = torch.optim.AdamW(model.parameters(), 2e-3)
    for batch in DataLoader(rows[: reviews // 2], batch_size=64, shuffle=True):  # type: ignore[arg-type]
        labels = batch.pop("labels")
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(**batch)["logits"], labels).backward()
        optimiser.step()

    unseen = DataLoader(rows[reviews // 2 :], batch_size=256)  # type: ignore[arg-type]
    bundle = offramp.compile(
        model, unseen, output=output, max_disagreement=max_disagreement, overwrite=True
    )
    with offramp.load(bundle.path) as served:
        for text in ("a lovely film", "the plot was not good and the cast was dull"):
            inputs = {name: np.asarray(ids)[None] for name, ids in tokenize(text).items()}
            result = served.predict(inputs)
            liked = "likes" if result.outputs["logits"].argmax() else "dislikes"
            print(f"{text!r}: {liked} it ({result.confidences[0]:.0%}, exit {result.exits[0]})")
    return bundle


if __name__ == "__main__":
    main()
