"""Gain of a decoder that answers with one token, with default flags.

    python -m benchmarks.small_decoder --output demo/decoder [--repeats 5] [--json FILE]

Trains the decoder if it is not in ``--output`` yet (:mod:`offramp.tools.zoo.small_decoder`, about
twelve minutes on a core), compiles it as ``eecompile MODEL --answer-tokens 3,4 --data CALIBRATION``
does, without a further flag, and compares the bundle with the reduced model, as
``benchmarks.trained_models`` does. The reduced model is compared with the whole one too: its
answers on all test prompts, and its time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import make_parser
from benchmarks.promise import resample
from benchmarks.tasks import DRAWS
from benchmarks.trained_models import compiled, measure, show

from offramp.bundle import Bundle
from offramp.calibration.data.dataset import Dataset
from offramp.engine.backends.onnxruntime import make_session
from offramp.tools.bench.common.output import check_outputs, describe_environment, write_json
from offramp.tools.zoo import small_decoder

_BATCH = 50
_TIMED = 20
"""Number of timed runs of a model at batch 1."""


def main() -> None:
    """Train missing models, compile, measure, print, and optionally write JSON."""
    parser = make_parser(__doc__)
    small_decoder.add_arguments(parser)
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        metavar="N",
        help="number of repetitions of the comparison",
    )
    parser.add_argument("--compiled", action="store_true", help="keep an existing bundle")
    options = parser.parse_args()
    check_outputs(options.json)
    model: Path = options.output / "decoder.onnx"
    facts, made, dataset = compiled(
        model, lambda: small_decoder.make(options), keep=options.compiled
    )
    source = made.read(made.manifest.source.file)
    facts["reduced"] = against_whole(model.read_bytes(), source, facts["answer_tokens"], dataset)
    facts |= measure(made, dataset, options.repeats, (1, 8, 16))
    facts["promise"] = resample(
        made.path, options.output / "test.npz", draws=DRAWS, seed=options.seed
    )
    facts["exit_checks"] = exit_checks(made, facts["batches"]["1"]["cpu"]["source_ms"])
    show([facts])
    environment = describe_environment(seed=options.seed, threads=1, repeats=options.repeats)
    write_json(options.json, {"models": [facts], "environment": environment})


def exit_checks(bundle: Bundle, source_ms: float) -> dict[str, float]:
    """Return the profiled time of each exit in use at batch 1, as a share of the model's."""
    profile = bundle.profile()
    column = profile.batch_sizes.index(1)
    return {
        str(active.exit): profile.exits_ms[active.exit][column] / source_ms
        for active in bundle.policy.active
    }


def against_whole(
    decoder: bytes, source: bytes, tokens: Sequence[int], dataset: Dataset
) -> dict[str, Any]:
    """Compare the reduced model, which only computes answer tokens, with the whole decoder."""
    whole, reduced = make_session(decoder, 1), make_session(source, 1)
    past = {tensor.name: tensor.shape for tensor in whole.get_inputs() if tensor.name[:4] == "past"}

    def whole_feeds(feeds: dict[str, Any]) -> dict[str, Any]:
        rows = len(feeds["input_ids"])
        empty = {n: np.zeros((rows, s[1], 0, s[3]), np.float32) for n, s in past.items()}
        return feeds | empty

    same = 0
    for start in range(0, len(dataset), _BATCH):
        feeds = {n: a[start : start + _BATCH] for n, a in dataset.inputs.items()}
        (logits,) = whole.run(["logits"], whole_feeds(feeds))
        last = feeds["attention_mask"].sum(axis=1) - 1
        wanted = logits[np.arange(len(last)), last][:, list(tokens)].argmax(axis=1)
        (found,) = reduced.run(["logits"], feeds)
        same += int((found.argmax(axis=1) == wanted).sum())
    one = {n: a[:1] for n, a in dataset.inputs.items()}
    ratios = []
    for _ in range(_TIMED):
        spent = []
        for session, feeds in ((whole, whole_feeds(one)), (reduced, one)):
            begun = time.thread_time()
            session.run(["logits"], feeds)
            spent.append(time.thread_time() - begun)
        ratios.append(spent[1] / spent[0])
    return {
        "prompts": len(dataset),
        "same_answer": same,
        "cpu_time_to_whole_at_1": statistics.median(ratios),
    }


if __name__ == "__main__":
    main()
