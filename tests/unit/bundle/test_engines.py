"""The store of engines: what it keeps, and that nothing in it is trusted."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.facts import Told, facts, tells
from tests.unit.bundle import examples

from offramp.bundle import (
    ActiveExit,
    Bundle,
    BundleBusyError,
    BundleError,
    BundleIntegrityError,
    BundleSchemaError,
    BundleWriteError,
    ExitPolicy,
    files,
    write_bundle,
)
from offramp.bundle.engine_index import addressed, model_digest
from offramp.bundle.engines import (
    ENGINES,
    EngineEntry,
    EngineIndex,
    EngineStore,
    EngineTarget,
    PrecisionEvidence,
    ShapeProfile,
    ShapeRange,
    list_targets,
    parts_digest,
    prune_targets,
)
from offramp.certify.binomial import upper_bound

TARGET = EngineTarget(
    gpu="NVIDIA H200", compute_capability=(9, 0), tensorrt="10.16.0.72", precision="fp16"
)
OTHER = replace(TARGET, gpu="NVIDIA L4", compute_capability=(8, 9))
SOURCE = hashlib.sha256(b"kernels.cu").hexdigest()
PROFILES = tuple(
    ShapeProfile(
        first_batch=first,
        last_batch=last,
        inputs={"x": ShapeRange(least=(first, 4), best=(last, 8), most=(last, 8))},
    )
    for first, last in ((1, 1), (2, 8))
)


def entry_of(unit: str, plan: bytes, **key: str) -> EngineEntry:
    return EngineEntry.of(unit, plan, key=key, profiles=PROFILES, build_s=1.5)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return examples.write(tmp_path / "small.ee")


@pytest.fixture
def store(bundle: Bundle) -> EngineStore:
    """Two engines, a timing cache and kernels."""
    store = EngineStore.open(bundle.path, TARGET)
    for unit in ("00-01", "00-00-exit0"):
        store.put(entry_of(unit, unit.encode(), graph=f"hash of {unit}"), unit.encode())
    store.put_timing_cache(b"timings")
    store.put_kernels(b"cubin", source=SOURCE)
    return store


def names_in(folder: Path) -> set[str]:
    return {place.name for place in folder.iterdir()}


@pytest.mark.parametrize(
    ("gpu", "version", "folder"),
    [
        ("NVIDIA H200", "10.16.0.72", "nvidia-h200-sm90-trt10.16.0.72-fp16"),
        ("NVIDIA A100-SXM4-80GB", "8.6.0", "nvidia-a100-sxm4-80gb-sm90-trt8.6.0-fp16"),
        ("../Quadro (TM)/ é", "11.4", "quadro-tm-sm90-trt11.4-fp16"),
        ("a..b", "10.0.0b6", "a-b-sm90-trt10.0.0b6-fp16"),
    ],
)
def test_a_target_has_a_folder_of_harmless_characters(gpu: str, version: str, folder: str) -> None:
    assert replace(TARGET, gpu=gpu, tensorrt=version).folder == folder


@pytest.mark.parametrize("changes", [{"gpu": "//"}, {"tensorrt": ""}])
def test_a_target_without_a_name_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="needs the name of a GPU and a version of TensorRT"):
        replace(TARGET, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "shapes",
    [((1,), (2,), (1,)), ((0,), (1,), (1,)), ((3,), (2,), (4,)), ((), (), ())],
)
def test_shapes_that_do_not_rise_are_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    least, best, most = shapes
    with pytest.raises(ValueError, match="do not rise"):
        ShapeRange(least=least, best=best, most=most)


def test_a_profile_whose_input_has_other_batches_is_refused() -> None:
    shapes = ShapeRange(least=(1, 3), best=(8, 3), most=(8, 3))
    with pytest.raises(ValueError, match=facts("batches 1 to 8", "2 to 8")):
        ShapeProfile(first_batch=2, last_batch=8, inputs={"x": shapes})


@pytest.mark.parametrize(
    ("shape", "profile"),
    [((1, 4), 0), ((1, 8), 0), ((2, 4), 1), ((8, 8), 1), ((9, 4), None), ((1, 3), None),
     ((2, 9), None), ((2,), None)],
)  # fmt: skip
def test_the_profile_for_a_shape(shape: tuple[int, ...], profile: int | None) -> None:
    assert entry_of("u", b"plan").profile_for({"x": shape, "unused": (1,)}) == profile


def test_what_was_put_is_read_by_another(bundle: Bundle, store: EngineStore) -> None:
    again = EngineStore.open(bundle.path, TARGET)
    assert again.index == store.index
    assert [e.unit for e in again.index.engines] == ["00-00-exit0", "00-01"]
    entry = again.entry("00-01")
    assert entry is not None
    assert entry == entry_of("00-01", b"00-01", graph="hash of 00-01")
    assert entry.profiles == PROFILES
    assert again.read(entry) == b"00-01"
    assert again.read_timing_cache() == b"timings"
    assert again.read_kernels(SOURCE) == b"cubin"


def test_an_empty_store(bundle: Bundle) -> None:
    store = EngineStore.open(bundle.path, TARGET)
    assert store.index.engines == ()
    assert store.entry("00-01") is None
    assert store.read_timing_cache() == b""
    assert store.read_kernels(SOURCE) is None
    assert not (bundle.path / ENGINES).exists()
    assert list_targets(bundle.path) == ()


def test_the_folder_holds_the_index_and_what_it_names(store: EngineStore) -> None:
    digest = hashlib.sha256(b"00-01").hexdigest()[:16]
    names = names_in(store.folder)
    assert f"00-01-{digest}.plan" in names
    assert names == {*store.index.files, "index.json"}
    assert sorted(name.rpartition(".")[2] for name in names) == [
        "cache", "cubin", "json", "plan", "plan",
    ]  # fmt: skip


def test_an_engine_replaces_that_of_its_unit(store: EngineStore) -> None:
    before = store.entry("00-01")
    assert before is not None
    entry = entry_of("00-01", b"better")
    store.put(entry, b"better")
    assert store.read(entry) == b"better"
    assert len(store.index.engines) == 2
    assert not (store.folder / before.file).exists()


def test_an_entry_has_to_describe_its_plan(store: EngineStore) -> None:
    with pytest.raises(ValueError, match="does not describe"):
        store.put(entry_of("00-01", b"one"), b"another")


def test_the_last_timing_cache_and_kernels_count(store: EngineStore) -> None:
    store.put_timing_cache(b"more timings")
    store.put_kernels(b"cubin", source=SOURCE)
    assert store.read_timing_cache() == b"more timings"
    assert store.read_kernels(SOURCE) == b"cubin"
    assert names_in(store.folder) == {*store.index.files, "index.json"}


def test_a_bundle_opens_with_engines_however_damaged(bundle: Bundle, store: EngineStore) -> None:
    for place in store.folder.iterdir():
        place.write_bytes(b"damaged")
    (store.folder / "foreign").symlink_to("/nowhere")
    assert Bundle.open(bundle.path).manifest == bundle.manifest


@pytest.mark.parametrize("name", ["engines.txt", "enginesx/a", "segments/engines/x"])
def test_what_is_not_under_engines_stays_foreign(bundle: Bundle, name: str) -> None:
    place = bundle.path / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(b"")
    with pytest.raises(BundleIntegrityError, match="does not belong"):
        Bundle.open(bundle.path)


def test_engines_may_be_no_link(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (bundle.path / ENGINES).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleIntegrityError, match="engines does not belong"):
        Bundle.open(bundle.path)
    with pytest.raises(BundleIntegrityError, match="leaves the bundle"):
        EngineStore.open(bundle.path, TARGET)
    with pytest.raises(BundleIntegrityError, match="leaves the bundle"):
        EngineStore.empty(bundle.path, TARGET).put_kernels(b"cubin", source=SOURCE)
    assert list_targets(bundle.path) == ()
    assert names_in(tmp_path / "elsewhere") == set()


def plan_file(store: EngineStore) -> Path:
    entry = store.entry("00-01")
    assert entry is not None
    return store.folder / entry.file


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda place: place.write_bytes(b"other"), ("altered",)),
        (lambda place: place.write_bytes(b"longer than it was"), ("18 bytes", "at most 5")),
        (lambda place: place.unlink(), ("No such file",)),
        (lambda place: (place.unlink(), place.symlink_to("/etc/hostname")), ("leaves the bundle",)),
        (lambda place: (place.unlink(), os.mkfifo(place)), ("regular file",)),
    ],
)
def test_a_damaged_plan_is_refused(store: EngineStore, damage: Any, said: Told) -> None:
    damage(plan_file(store))
    entry = store.entry("00-01")
    assert entry is not None
    with pytest.raises(BundleIntegrityError, match=facts(*said)) as refused:
        store.read(entry)
    assert f"eecompile build {store.bundle_path}" in str(refused.value)


def rewrite_index(store: EngineStore, **changes: Any) -> None:
    place = store.folder / "index.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | changes))


FOREIGN_NAMES = ["../../source.onnx", "/etc/hostname", "", "a\\b", "a/b", "..", ".lock",
                 "index.json", "Index.JSON", "a\n"]  # fmt: skip


@pytest.mark.parametrize("what", ["kernels", "timing_cache", "engines"])
@pytest.mark.parametrize("name", FOREIGN_NAMES)
def test_an_index_cannot_name_files_elsewhere(store: EngineStore, what: str, name: str) -> None:
    index = json.loads((store.folder / "index.json").read_text())
    if what == "engines":
        index["engines"][0]["file"] = name
    else:
        index[what]["path"] = name
    rewrite_index(store, **index)
    refused = "is not the name of a file in the folder|expected text without control characters"
    with pytest.raises(BundleSchemaError, match=refused):
        EngineStore.open(store.bundle_path, TARGET)
    assert list_targets(store.bundle_path) == ()


@pytest.mark.parametrize("what", ["kernels", "timing_cache", "engines"])
def test_building_for_a_foreign_bundle_deletes_no_files_of_the_user(
    store: EngineStore, tmp_path: Path, what: str
) -> None:
    """Files of the old index are removed if a new one does not have them: here that is the
    victim.
    """
    victim = tmp_path / "victim"
    victim.write_bytes(b"dear")
    for name in (str(victim), f"../../../{victim.name}"):
        index = json.loads((store.folder / "index.json").read_text())
        if what == "engines":
            index["engines"][0]["file"] = name
        else:
            index[what]["path"] = name
        rewrite_index(store, **index)
        with pytest.raises(BundleSchemaError, match="eecompile build"):
            opened = EngineStore.open(store.bundle_path, TARGET)
            opened.prune([])
            opened.put_timing_cache(b"new")
            opened.put_kernels(b"new", source=SOURCE)
        assert victim.read_bytes() == b"dear"


def test_kernels_are_known_by_what_they_were_compiled_of(store: EngineStore) -> None:
    other = hashlib.sha256(b"kernels.cu of next year").hexdigest()
    assert store.read_kernels(SOURCE) == b"cubin"
    assert store.read_kernels(other) is None
    store.put_kernels(b"cubin", source=other)
    assert store.read_kernels(SOURCE) is None
    assert store.read_kernels(other) == b"cubin"
    assert names_in(store.folder) == {*store.index.files, "index.json"}
    store.drop_kernels()
    assert store.read_kernels(other) is None
    assert not [name for name in names_in(store.folder) if name.endswith(".cubin")]
    assert EngineStore.open(store.bundle_path, TARGET).index.kernels is None


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"schema_version": 2}, BundleSchemaError, ("schema version 2", "1")),
        ({"extra": 1}, BundleSchemaError, ("damaged", "unknown fields")),
        ({"engines": 3}, BundleSchemaError, ("damaged", "list")),
        (
            {"target": json.loads('{"gpu": "NVIDIA L4", "compute_capability": [8, 9], '
                                  '"tensorrt": "10.16.0.72", "precision": "fp16"}')},
            BundleIntegrityError, ("NVIDIA L4", "NVIDIA H200")
        ),
    ],
)  # fmt: skip
def test_an_index_that_is_not_understood(
    store: EngineStore, changes: dict[str, Any], error: type[BundleError], said: Told
) -> None:
    rewrite_index(store, **changes)
    with pytest.raises(error, match=facts(*said)) as refused:
        EngineStore.open(store.bundle_path, TARGET)
    tells(str(refused.value), f"eecompile build {store.bundle_path}")


def test_an_index_that_is_no_json(store: EngineStore) -> None:
    (store.folder / "index.json").write_bytes(b"{")
    with pytest.raises(BundleSchemaError, match="not JSON"):
        EngineStore.open(store.bundle_path, TARGET)


def test_units_of_an_index_are_known_by_name(store: EngineStore) -> None:
    with pytest.raises(ValueError, match="must increase"):
        replace(store.index, engines=store.index.engines * 2)


class InterruptedHereError(Exception):
    pass


@pytest.mark.parametrize("at", ["chmod", "replace"])
def test_an_interrupted_put_leaves_what_was_there(
    store: EngineStore, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    index, names = store.index, names_in(store.folder)

    def interrupt(*_: object) -> None:
        raise InterruptedHereError

    with monkeypatch.context() as patched:
        patched.setattr(Path, at, interrupt)
        with pytest.raises(InterruptedHereError):
            store.put(entry_of("00-01", b"better"), b"better")
    assert names_in(store.folder) == names
    assert EngineStore.open(store.bundle_path, TARGET).index == index


def test_a_put_cut_off_before_the_index_is_cleaned_up(
    store: EngineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The case is a process killed between writing the plan and the index that names it."""
    index = store.index

    def killed(_: EngineIndex) -> None:
        raise InterruptedHereError

    with monkeypatch.context() as patched:
        patched.setattr(store, "_commit", killed)
        with pytest.raises(InterruptedHereError):
            store.put(entry_of("00-01", b"better"), b"better")
    (store.folder / ".abcd").write_bytes(b"a half")
    (store.folder / "folder").mkdir()
    left = entry_of("00-01", b"better").file
    again = EngineStore.open(store.bundle_path, TARGET)
    assert again.index == index
    assert set(again.clean()) == {left, ".abcd", "folder"}
    assert names_in(store.folder) == {*index.files, "index.json"}
    assert again.clean() == ()


def test_a_full_disk_is_one_clear_error(
    store: EngineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = store.index

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(BundleWriteError, match=r"No space left.*free the space"):
        store.put(entry_of("00-01", b"better"), b"better")
    assert store.index == index
    assert store.read_kernels(SOURCE) == b"cubin"


def test_pruning_keeps_what_is_asked_for(store: EngineStore) -> None:
    gone = plan_file(store)
    assert store.prune(["00-00-exit0", "never built"]) == ("00-01",)
    assert [e.unit for e in store.index.engines] == ["00-00-exit0"]
    assert not gone.exists()
    assert store.prune(["00-00-exit0"]) == ()
    assert store.read_timing_cache() == b"timings"


def test_targets_are_found_and_pruned(bundle: Bundle, store: EngineStore) -> None:
    assert list_targets(bundle.path) == (TARGET,)
    EngineStore.open(bundle.path, OTHER).put(entry_of("00-01", b"plan"), b"plan")
    assert list_targets(bundle.path) == (TARGET, OTHER)
    damaged = bundle.path / ENGINES / "damaged"
    damaged.mkdir()
    (damaged / "index.json").write_bytes(b"?")
    assert list_targets(bundle.path) == (TARGET, OTHER)
    assert prune_targets(bundle.path, [OTHER]) == (("damaged", TARGET.folder), ())
    assert names_in(bundle.path / ENGINES) == {OTHER.folder}


def test_a_folder_that_a_build_is_at_work_in_is_not_pruned(
    bundle: Bundle, store: EngineStore
) -> None:
    other = EngineStore.open(bundle.path, OTHER)
    other.put(entry_of("00-01", b"plan"), b"plan")
    with other.exclusively():
        assert prune_targets(bundle.path, []) == ((TARGET.folder,), (OTHER.folder,))
        other.put(entry_of("00-00-exit0", b"plan"), b"plan")
        assert len(EngineStore.open(bundle.path, OTHER).index.engines) == 2
    assert prune_targets(bundle.path, []) == ((OTHER.folder,), ())
    assert names_in(bundle.path / ENGINES) == set()


def test_pruning_removes_a_link_but_not_its_target(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (bundle.path / ENGINES).mkdir()
    (bundle.path / ENGINES / "link").symlink_to(tmp_path / "elsewhere")
    assert prune_targets(bundle.path, []) == (("link",), ())
    assert names_in(bundle.path / ENGINES) == set()
    assert names_in(tmp_path / "elsewhere") == set()


def test_an_engine_is_dropped(store: EngineStore) -> None:
    gone = plan_file(store)
    store.drop("00-01")
    store.drop("never built")
    assert [e.unit for e in EngineStore.open(store.bundle_path, TARGET).index.engines] == [
        "00-00-exit0"
    ]
    assert not gone.exists()


def test_a_folder_under_another_name_is_no_target(bundle: Bundle, store: EngineStore) -> None:
    store.folder.rename(store.folder.with_name(OTHER.folder))
    assert list_targets(bundle.path) == ()


def test_whether_engines_run_elsewhere() -> None:
    assert TARGET.runs_where(replace(TARGET, precision="int8"))
    assert not TARGET.runs_where(OTHER)
    assert not TARGET.runs_where(replace(TARGET, tensorrt="11.4"))


def test_one_build_at_a_time(bundle: Bundle) -> None:
    """Another process, as the lock is one between processes."""
    script = textwrap.dedent(f"""
        from offramp.bundle import BundleBusyError
        from offramp.bundle.engines import EngineStore
        from tests.unit.bundle.test_engines import TARGET
        try:
            with EngineStore.empty({str(bundle.path)!r}, TARGET).exclusively():
                print("free")
        except BundleBusyError:
            print("busy")
    """)

    def ask() -> str:
        root = Path(__file__).parents[3]
        ran = subprocess.run(
            [sys.executable, "-c", script], cwd=root, env=os.environ | {"PYTHONPATH": f"{root}:"
            f"{root / 'src'}"}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return ran.stdout.strip()

    with EngineStore.empty(bundle.path, TARGET).exclusively():
        assert ask() == "busy"
    assert ask() == "free"


def test_a_second_build_in_the_same_process_is_refused(bundle: Bundle) -> None:
    store = EngineStore.empty(bundle.path, TARGET)
    busy = pytest.raises(BundleBusyError, match="another build is at work")
    with store.exclusively(), busy, store.exclusively():
        pytest.fail("two builds at once")


def test_where_files_cannot_be_locked_a_build_goes_on_with_a_warning(
    store: EngineStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with store.exclusively():
        store.put_timing_cache(b"more timings")
    assert store.read_timing_cache() == b"more timings"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    tells(record.message, "cannot be locked", "No locks available", "a second")


def test_the_lock_is_no_way_to_a_file_of_the_user(store: EngineStore, tmp_path: Path) -> None:
    """The lock may be a link in a foreign bundle, which opening for writing would follow."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"dear")
    (store.folder / ".lock").symlink_to(victim)
    with pytest.raises(BundleWriteError, match="cannot be written"), store.exclusively():
        pytest.fail("the link was followed")
    assert victim.read_bytes() == b"dear"


def copy_with(bundle: Bundle, path: Path, engines_of: Path | None, **options: Any) -> Bundle:
    names = [e.path for e in bundle.manifest.files if e.path != "policy.json"]
    files = {name: bundle.read(name) for name in names}
    return write_bundle(
        path, bundle.manifest, bundle.policy, files, engines_of=engines_of, **options
    )


def test_a_bundle_of_the_same_graphs_gets_the_engines(
    bundle: Bundle, store: EngineStore, tmp_path: Path
) -> None:
    (store.folder / ".half").write_bytes(b"of an interrupted build")
    (store.folder / "link").symlink_to("/etc/hostname")
    copy = copy_with(bundle, tmp_path / "copy.ee", bundle.path)
    carried = EngineStore.open(copy.path, TARGET)
    assert carried.index == store.index
    assert carried.read_kernels(SOURCE) == b"cubin"
    assert names_in(carried.folder) == {*store.index.files, "index.json"}
    carried.put_kernels(b"another", source=SOURCE)
    assert store.read_kernels(SOURCE) == b"cubin"


def test_replacing_a_bundle_in_place_keeps_its_engines(bundle: Bundle, store: EngineStore) -> None:
    copy_with(bundle, bundle.path, bundle.path, overwrite=True)
    again = EngineStore.open(bundle.path, TARGET)
    assert again.index == store.index
    entry = again.entry("00-01")
    assert entry is not None
    assert again.read(entry) == b"00-01"


def test_a_failed_replacement_keeps_the_engines(
    bundle: Bundle, store: EngineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(1, "no")))
        patched.setattr(files, "exchange", lambda *_: False)
        with pytest.raises(BundleWriteError):
            copy_with(bundle, bundle.path, bundle.path, overwrite=True)
    again = EngineStore.open(bundle.path, TARGET)
    assert again.index == store.index
    assert again.read_kernels(SOURCE) == b"cubin"


def test_engines_are_copied_where_files_cannot_be_linked(
    bundle: Bundle, store: EngineStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "hardlink_to", lambda *_: (_ for _ in ()).throw(OSError(18, "no")))
    copy = copy_with(bundle, tmp_path / "copy.ee", bundle.path)
    carried = EngineStore.open(copy.path, TARGET)
    assert carried.read_kernels(SOURCE) == b"cubin"
    assert (carried.folder / "index.json").stat().st_nlink == 1


@pytest.mark.parametrize("links", [True, False])
def test_what_a_build_replaces_meanwhile_is_left_behind(
    bundle: Bundle,
    store: EngineStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    links: bool,
) -> None:
    """The build replaces one engine when the index was taken, but not that engine."""
    before = store.index
    gone, link = plan_file(store), Path.hardlink_to

    def slow(target: Path, place: Path) -> None:
        if place == gone:
            store.put(entry_of("00-01", b"better"), b"better")
        if not links:
            raise OSError(18, "no links")
        link(target, place)

    monkeypatch.setattr(Path, "hardlink_to", slow)
    carried = EngineStore.open(copy_with(bundle, tmp_path / "copy.ee", bundle.path).path, TARGET)
    assert carried.index == before
    entry = carried.entry("00-00-exit0")
    assert entry is not None
    assert carried.read(entry) == b"00-00-exit0"
    assert not (carried.folder / gone.name).exists()
    assert carried.read_kernels(SOURCE) == b"cubin"


def test_a_folder_that_is_pruned_meanwhile_is_left_behind(
    bundle: Bundle, store: EngineStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def slow(place: Path, *arguments: Any, **options: Any) -> None:
        if place.name == TARGET.folder:
            prune_targets(bundle.path, [])
        mkdir(place, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", slow)
    copy = copy_with(bundle, tmp_path / "copy.ee", bundle.path)
    assert EngineStore.open(copy.path, TARGET).index.engines == ()


def test_a_fresh_compile_drops_the_engines(bundle: Bundle, store: EngineStore) -> None:
    copy_with(bundle, bundle.path, None, overwrite=True)
    assert not (bundle.path / ENGINES).exists()


def test_what_a_unit_is_made_of(bundle: Bundle) -> None:
    """Segments 0 and 1; an exit after 0."""
    manifest = bundle.manifest
    hashes = {entry.path: entry.sha256 for entry in manifest.files}
    for unit, names in {
        (0, 1, None): ["source.onnx"],
        (0, 0, None): ["segments/00.onnx"],
        (1, 1, None): ["segments/01.onnx"],
        (0, 0, 0): ["segments/00.onnx", "exits/00.onnx"],
    }.items():
        joined = "\n".join(hashes[name] for name in names)
        assert parts_digest(manifest, *unit) == hashlib.sha256(joined.encode()).hexdigest()


def evidence_of(records: bytes, **changes: Any) -> PrecisionEvidence:
    facts: dict[str, Any] = {
        "model": "m",
        "policy": examples.POLICY,
        "records": addressed("records", records, ".npz"),
        "samples": 1000,
        "end_differs": 2,
        "max_disagreement": 0.01,
        "confidence_level": 0.95,
    }
    return PrecisionEvidence(**{**facts, **changes})


def test_evidence_is_kept_beside_the_engines(bundle: Bundle, store: EngineStore) -> None:
    first, second = evidence_of(b"first"), evidence_of(b"second", end_differs=3)
    store.put_evidence(first, b"first")
    store.put_evidence(second, b"second")
    again = EngineStore.open(bundle.path, store.index.target)
    assert again.index.evidence == second
    assert again.read_evidence(second) == b"second"
    assert not (store.folder / first.records.path).exists()
    again.put_evidence(None)
    assert not (store.folder / second.records.path).exists()
    assert EngineStore.open(bundle.path, store.index.target).index.evidence is None


def test_evidence_has_to_describe_its_records(store: EngineStore) -> None:
    with pytest.raises(ValueError, match="does not describe these records"):
        store.put_evidence(evidence_of(b"others"), b"records")


def test_damaged_records_of_engines_are_refused(store: EngineStore) -> None:
    evidence = evidence_of(b"records")
    store.put_evidence(evidence, b"records")
    (store.folder / evidence.records.path).write_bytes(b"recorda")
    with pytest.raises(BundleIntegrityError, match="records-"):
        store.read_evidence(evidence)


def test_a_policy_of_other_exits_is_refused(bundle: Bundle) -> None:
    beyond = ExitPolicy(version=1, active=(ActiveExit(exit=99, threshold=0.5),))
    with pytest.raises(BundleSchemaError, match="names an exit beyond"):
        bundle.under(evidence_of(b"", policy=beyond), b"")


@pytest.mark.parametrize(
    "changes", [{"end_differs": 1001}, {"samples": 0}, {"max_disagreement": 0.0}]
)
def test_evidence_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        evidence_of(b"", **changes)


def test_what_is_spent_is_bounded_at_half_of_the_risk() -> None:
    evidence = evidence_of(b"")
    assert evidence.spent(0.95) == upper_bound(2, 1000, 0.975)
    assert evidence.spent(0.99) == pytest.approx(upper_bound(2, 1000, 0.995))
    assert 0.002 < evidence.spent(0.95) < evidence.spent(0.99) < 0.01


@pytest.mark.parametrize(
    "name", ["policy.json", "records.npz", "segments/01.onnx", "exits/00.onnx"]
)
def test_whatever_a_policy_depends_on_is_in_its_digest(bundle: Bundle, name: str) -> None:
    manifest = bundle.manifest
    assert model_digest(manifest) == model_digest(replace(manifest, files=manifest.files[::-1]))
    changed = tuple(
        replace(file, sha256="0" * 64) if file.path == name else file for file in manifest.files
    )
    assert changed != manifest.files
    assert model_digest(replace(manifest, files=changed)) != model_digest(manifest)
