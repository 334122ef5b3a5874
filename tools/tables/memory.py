"""Tables of the time, memory and disk space that compiling and loading need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from offramp.tools.tables.rows import Result, Rows, Table


def large_models(result: Result) -> Rows:
    """Yield CPU seconds by the number of operators."""
    yield "operators", "read", "with onnxslim", "find cut points", "slice"
    for row in result["rows"]:
        seconds = (row.get(key) for key in ("read_s", "read_with_onnxslim_s", "cut_s", "slice_s"))
        yield f"{row['operators']:,}", *("–" if s is None else f"{s:.2f}" for s in seconds)


def compile_memory(*results: Result) -> Rows:
    """Yield the peak memory of compilations in MB, and the step that needed it."""
    yield "model", "data", "most resident", "most anonymous", "where"
    names = (
        "BERT-base's size, 438 MB, 16 tokens",
        "the same, 128 tokens",
        "four convolutions",
        "the same",
    )
    runs = [run for result in results for run in result["runs"]]
    for name, run in zip(names, runs, strict=True):
        steps = {key: max(run["steps"], key=lambda s: s[key])["step"]
                 for key in ("resident_mb", "anonymous_mb")}  # fmt: skip
        yield (
            name,
            f"{run['samples']:,} samples, {run['data_mb']:.1f} MB",
            f"{run['peak_resident_mb']:,.0f}",
            f"{run['peak_anonymous_mb']:,.0f}",
            "; ".join(dict.fromkeys(step.removeprefix("(after) ") for step in steps.values())),
        )


def beyond_two_gib(result: Result) -> Rows:
    """Yield the peak memory of commands on a model of 3 GiB."""
    yield "command", "most resident", "most anonymous"
    for run in result["runs"]:
        parts = [f"{run[key] / 2**30:.1f} GiB" for key in ("resident_bytes", "anonymous_bytes")]
        yield f"`{run['command']}`", *parts


def bundle_memory(result: Result) -> Rows:
    """Yield figures of a bundle with one weights file, relative to weights in every graph."""
    yield "", "Fashion example", "BERT, 6 × 768, random weights"
    bundles = [result["measured"][name] for name in ("fashion", "bert-6x768-0")]
    loaded = [bundle["loaded"]["serve"] for bundle in bundles]
    disks = (bundle["disk_mib"] for bundle in bundles)
    yield "on the disk", *(f"{d['named']:.1f} instead of {d['held']:.1f} MiB" for d in disks)
    yield "time to load", *(f"{part['load_s']['ratio'][0]:.2f}" for part in loaded)
    for name, key in (("proportional set size", "pss_mib"), ("most resident", "peak_mib")):
        parts = [part[key] for part in loaded]
        cells = (f"{p['named']:.1f} instead of {p['held']:.1f} MiB" for p in parts)
        yield f"{name}, while loading" if key == "peak_mib" else name, *cells
    for size in (1, 8):
        ratios = (bundle["speed"][f"batch_{size}_ms"]["ratio"] for bundle in bundles)
        yield (
            f"processor time of a batch of {size}",
            *(f"{ratio:.2f} ({least:.2f} to {most:.2f})" for ratio, least, most in ratios),
        )


def variant_memory(result: Result) -> Rows:
    """Yield memory and times of six subnets in a process, with and without shared weights."""
    yield "", "BERT, 6 × 768", "elastic ResNet"
    measured = [result["measured"][name] for name in ("bert", "resnet")]
    kinds = {"own": "ordinary sessions", "packed": "`never`", "shared": "`always`"}
    yield (
        "weights in one file, and in all graphs",
        *(f"{m['file_mib']:.1f}, {m['in_every_graph_mib']:.1f} MiB" for m in measured),
    )
    for key, name in kinds.items():
        yield f"PSS, {name}", *(f"{m['loaded'][key]['pss_mib']:.1f} MiB" for m in measured)
    yield (
        "`always`, of which anonymous",
        *(f"{m['loaded']['shared']['anonymous_mib']:.1f} MiB" for m in measured),
    )
    yield (
        "ordinary sessions over `always`",
        *(f"{m['times_less_than_own'][0]:.1f} times" for m in measured),
    )
    yield (
        "time to load: ordinary, `never`, `always`",
        *(", ".join(f"{m['loaded'][key]['load_s']:.2f}" for key in kinds) + " s" for m in measured),
    )
    for size in (1, 8):
        ratios = ([s["shared_to_packed"] for s in m["speed"][f"batch_{size}"]] for m in measured)
        yield (
            f"time of a batch of {size}, `always`",
            *(f"{min(r):.2f} to {max(r):.2f}" for r in ratios),
        )


TABLES: Final[Mapping[str, Table]] = {
    "beyond-two-gib": Table(beyond_two_gib, ("beyond_two_gib",)),
    "large-models": Table(large_models, ("large_models",)),
    "compile-memory": Table(
        compile_memory, ("compile_memory_bert", "compile_memory_bert_128", "compile_memory_data")
    ),
    "bundle-memory": Table(bundle_memory, ("bundle_memory",)),
    "variant-memory": Table(variant_memory, ("variant_memory",)),
}
