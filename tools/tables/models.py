"""Tables of what exits save on a model: compared with its source, other methods, and int8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from offramp.tools.tables.rows import Result, Rows, Table, by, percent, times

_COMPARED: Final = (
    ("Fashion-MNIST, ResNet-56", (1, 4, 16, 32)),
    ("sentiment, MiniLM (6 layers)", (1, 16)),
)
"""Models of fashion.json and minilm_sentiment.json, and the batch sizes that are shown."""


def compare(*results: Result) -> Rows:
    """Yield README's table: a bundle's times relative to the unmodified model's."""
    yield "model", "batch", "mean", "median", "p99", "busy time", "nothing exits", "agreement"
    for (model, sizes), result in zip(_COMPARED, results, strict=True):
        rows = by(result["rows"], "system", "batch_size")
        for size in sizes:
            source, early, none = (
                rows[system, size] for system in ("source", "offramp", "offramp-no-exit")
            )
            shares = [
                early[key] / source[key]
                for key in ("mean_ms", "median_ms", "p99_ms", "busy_ms_per_sample")
            ]
            shares.append(none["busy_ms_per_sample"] / source["busy_ms_per_sample"])
            agreement = percent(early["agreement"], 2)
            yield model, str(size), *(f"{share:.2f}" for share in shares), agreement


def gains(*results: Result) -> Rows:
    """Yield the landing page's table: README's table with fewer columns and batch sizes."""
    yield "model", "batch", "mean latency", "busy time", "answers that agree"
    _, *rows = compare(*results)
    for model, size, mean, _, _, busy, _, agreement in rows:
        if size != "4":
            yield model, size, mean, busy, agreement


def methods(*results: Result) -> Rows:
    """Yield published methods on the same exits: processor time, mean latency, agreement."""
    systems = ("offramp", "branchynet", "deebert", "pabee")
    yield "model", "batch", *(f"`{system}`" for system in systems)
    models = ("example, ResNet-56", "MiniLM, reviews (OpenVINO)", "ViT, 8 layers")
    for model, result in zip(models, results, strict=True):
        rows = by(result["rows"], "system", "batch_size")
        for size in (1, 16, 32):
            if ("source", size) not in rows:
                continue
            source = rows["source", size]
            shown = (
                f"{times(row['busy_ms_per_sample'] / source['busy_ms_per_sample'])}, "
                f"{times(row['mean_ms'] / source['mean_ms'])}, {percent(row['agreement'], 2)}"
                for row in (rows[system, size] for system in systems)
            )
            yield model, str(size), *shown


_FRONTIER: Final = (
    ("example (CNN, 56 layers)", "Xeon, AVX-512 VNNI"),
    ("example (CNN, 56 layers)", "EPYC, AVX-512 VNNI and BF16"),
    ("MiniLM, sentiment", "Xeon, AVX-512 VNNI"),
    ("MiniLM, sentiment, all 11,897 reviews", "EPYC, AVX-512 VNNI and BF16"),
    ("ResNet-18 of half the width", "EPYC, AVX-512 VNNI and BF16"),
)


def frontier(*results: Result) -> Rows:
    """Yield busy times at batch 16 relative to float32: int8, exits and both, by bound."""
    columns = {
        "int8 alone, uncertified": ("int8", None),
        "int8, certified 1 %": ("int8-certified", 0.01),
        "exits, 1 %": ("exits", 0.01),
        "both, 1 %": ("both", 0.01),
        "exits, 2 %": ("exits", 0.02),
        "both, 2 %": ("both", 0.02),
    }
    yield "model", "CPU", *columns
    for named, result in zip(_FRONTIER, results, strict=True):
        systems = by(result["systems"], "system", "max_disagreement")
        busy = (by(systems[key]["measured"], "batch_size")[16]["busy"] for key in columns.values())
        yield *named, *(f"{ratio['value']:.2f} ± {ratio['half_width']:.2f}" for ratio in busy)


def frontier_short(*results: Result) -> Rows:
    """Yield the rows of :func:`frontier` at a bound of 1 %, without intervals."""
    for model, cpu, int8, _, exits, both, *_ in frontier(*results):
        yield model, cpu, *(cell.split(" ±")[0] for cell in (int8, exits, both))


def trained_models(result: Result) -> Rows:
    """Yield small models compiled by default: busy time in CPU time, with minimum and maximum."""
    yield "model", "weights", "accuracy", "exits in use", "batch 1", "batch 16", "agreement"
    names = {
        "vit": "ViT, 8 layers, images",
        "mobilenet": "MobileNetV2-like, images",
        "mlp": "residual MLP, images",
        "text": "transformer on reviews",
    }
    models = {m["model"]: m for m in reversed(result["models"])}  # the first run of each
    for name, shown in names.items():
        model = models[name]
        busy = [model["batches"][size]["cpu"]["busy"] for size in ("1", "16")]
        yield (
            shown,
            f"{model['parameters'] / 1e6:.1f} M",
            percent(model["test_accuracy"]),
            str(len(model["exits"]["in_use"])),
            *(f"{b['median']:.2f} ({b['least']:.2f}–{b['most']:.2f})" for b in busy),
            percent(model["batches"]["16"]["agreement"], 2),
        )


_TASKS: Final[Mapping[str, str]] = {
    "segmentation": "segmentation",
    "pose": "key points",
    "tokens": "classes of words",
    "labels": "sets of labels",
    "values": "values",
}


def tasks(result: Result) -> Rows:
    """Yield times of other tasks relative to the unmodified model's, at batch 1, 8 and 16."""
    yield "", "exits in use", "mean latency at batch 1, 8, 16", "busy", "nothing exits", "agreement"
    models = by(result["models"], "model")
    for name, shown in _TASKS.items():
        batches = [models[name]["batches"][size] for size in ("1", "8", "16")]
        ratios = (
            ", ".join(f"{batch['cpu'][key]['median']:.2f}" for batch in batches)
            for key in ("mean_latency", "busy", "busy_nothing_exits")
        )
        in_use = str(len(models[name]["exits"]["in_use"]))
        yield shown, in_use, *ratios, percent(batches[0]["agreement"])


def exit_families(result: Result) -> Rows:
    """Yield pooled heads, bridges and joint training, compared on four models."""
    yield (
        "", "exits in use", "agreement of the best exit", "savings, certified and predicted",
        "busy at batch 8", "compiled in",
    )  # fmt: skip
    models = by(result["models"], "model")
    names = {
        "fashion_resnet56.onnx": "ResNet-56",
        "text.onnx": "text encoder",
        "minilm_sentiment.onnx": "MiniLM (6 layers)",
        "segmentation": "segmentation",
    }
    for name, model in names.items():
        for family in ("pooled", "bridges", "joint"):
            if (way := models[name]["ways"].get(family)) is None:
                continue
            exits = way["exits"]
            used = f"{len(exits['in_use'])} of {exits['built']}"
            if family == "joint" and not way["copy_is_used"]:
                used += ", the copy brought nothing"
            yield (
                f"{model}, {family}",
                used,
                percent(max(exits["agreement"].values())),
                percent(exits["predicted_savings"]),
                f"{way['batches']['8']['cpu']['busy']['median']:.2f}",
                f"{way['compile']['seconds']:,.0f} s",
            )


def subnets(result: Result) -> Rows:
    """Yield the smallest busy time of exits, subnets and both, at equal accuracy."""
    yield "points of accuracy lost", "batch 1", "batch 8", "batch 16"
    equal = by(result["equal"], "worth", "drop", "batch_size")
    for drop in (0.0, 0.005, 0.01, 0.02):
        cells = (equal["accuracy", drop, size]["times"] for size in (1, 8, 16))
        yield (
            f"{100 * drop:g}",
            *(", ".join(f"{c[way]:.2f}" for way in ("exits", "subnets", "both")) for c in cells),
        )


def h200(result: Result) -> Rows:
    """Yield float32 on an H200: latencies with exits relative to the source model's engine."""
    yield (
        "float32, batch", "source model", "mean with exits", "p99 with exits", "samples/s",
        "nothing exits",
    )  # fmt: skip
    shown = (
        ("ResNet-101, TensorRT 8.6", "pame_tensorrt_fp32", "resnet101", (16, 32)),
        ("BERT-base, TensorRT 8.6", "pame_tensorrt_fp32", "bert-base", (16, 32)),
        ("ResNet-101, ONNX Runtime's CUDA provider", "pame_cuda_fp32", "resnet101", (32,)),
        ("BERT-base, ONNX Runtime's CUDA provider", "pame_cuda_fp32", "bert-base", (32,)),
    )
    for name, part, model, sizes in shown:
        rows = by(result[part]["models"][model]["latencies"], "system", "batch_size")
        for size in sizes:
            source, early, none = (
                rows[system, size] for system in ("source", "offramp", "offramp-no-exit")
            )
            yield (
                f"{name}, {size}",
                f"{source['mean_ms']:.2f}",
                f"{early['mean_ms']:.2f} ({times(early['mean_ms'] / source['mean_ms'])})",
                times(early["p99_ms"] / source["p99_ms"]),
                times(source["busy_ms_per_sample"] / early["busy_ms_per_sample"]),
                f"{100 * (none['mean_ms'] / source['mean_ms'] - 1):+.1f} %",
            )


TABLES: Final[Mapping[str, Table]] = {
    "compare": Table(compare, ("fashion", "minilm_sentiment")),
    "gains": Table(gains, ("fashion", "minilm_sentiment")),
    "methods": Table(methods, ("methods_fashion", "methods_minilm", "methods_vit")),
    "trained-models": Table(trained_models, ("trained_models",)),
    "tasks": Table(tasks, ("tasks",)),
    "exit-families": Table(exit_families, ("exit_families",)),
    "subnets": Table(subnets, ("subnets",)),
    "h200": Table(h200, ("gpu_h200",)),
    **{
        name: Table(
            rows,
            (
                "frontier_fashion", "frontier_fashion_epyc", "frontier_minilm",
                "frontier_minilm_epyc", "frontier_resnet18",
            ),
        )
        for name, rows in (("frontier", frontier), ("frontier-short", frontier_short))
    },
}  # fmt: skip
