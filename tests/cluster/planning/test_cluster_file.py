"""cluster.toml: what it says, and a line for each way to say it wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.facts import Told, facts

from offramp.bundle import Profile
from offramp.cluster.planning.cluster_file import (
    ClusterFileError,
    RouterEntry,
    parse_cluster,
)
from offramp.cluster.planning.cluster_times import make_cluster, times_of
from offramp.cluster.planning.worker_entry import WorkersEntry
from offramp.engine.scheduling import DeviceLink

FULL = """
[devices.fast]
count = 2
cost_per_hour = 3
profile = "fast.json"
memory_gib = 16

[devices.slow]
count = 8
cost_per_hour = 0.5
speed = 0.25

[link]
gbit_per_s = 10
latency_ms = 0.2

[[links]]
from = "slow"
to = "fast"
gbit_per_s = 1
"""


def profile(segments: int = 2, slower: float = 1.0) -> Profile:
    return Profile(
        device="cpu",
        threads=1,
        batch_sizes=(1, 4),
        source_ms=(slower * segments, slower * 2 * segments),
        segments_ms=((slower, 2 * slower),) * segments,
        exits_ms=((0.1, 0.4),),
        stages_ms=((0.2, 0.2),),
    )


def test_a_cluster_is_read_with_its_units() -> None:
    file = parse_cluster(FULL.encode())
    fast, slow = file.devices
    assert (fast.name, fast.count, fast.cost_per_hour) == ("fast", 2, 3.0)
    assert (fast.profile, fast.speed, fast.memory_bytes) == ("fast.json", None, 16 * 2**30)
    assert (slow.profile, slow.speed, slow.memory_bytes) == (None, 0.25, math.inf)
    assert file.link == DeviceLink(bytes_per_s=1.25e9, latency_s=2e-4)
    assert file.links == (("slow", "fast", DeviceLink(bytes_per_s=1.25e8)),)


def test_workers_are_read_and_plans_are_made_without_them() -> None:
    text = """
[[workers]]
device = "fast"
address = "10.0.0.2:7070"
[[workers]]
device = "slow"
count = 3
[router]
token_file = "token"
tls_ca = "ca.pem"
"""
    file = parse_cluster((FULL + text).encode())
    assert file.workers == (
        WorkersEntry(device="fast", address="10.0.0.2:7070", count=1),
        WorkersEntry(device="slow", address=None, count=3),
    )
    assert file.router == RouterEntry(token_file="token", tls_ca="ca.pem")
    profiles = {"fast.json": profile()}
    plain = make_cluster(parse_cluster(FULL.encode()), profile(), profiles, 4)
    assert [(t.name, t.count) for t in make_cluster(file, profile(), profiles, 4).types] == [
        (t.name, t.count) for t in plain.types
    ]


GPUS = """
[devices.cpu]
count = 1
cost_per_hour = 0.4
speed = 1
[devices.cuda]
count = 3
cost_per_hour = 2
profile = "cuda.json"
[devices."cuda:9"]
count = 1
cost_per_hour = 1
speed = 5
[[workers]]
device = "cpu"
"""


def test_workers_on_gpus_have_a_type_and_a_number() -> None:
    text = """
[[workers]]
device = "cuda:1"
backend = "tensorrt"
[[workers]]
device = "cuda:1"
address = "10.0.0.2:7070"
backend = "cuda"
[[workers]]
device = "cuda:9"
backend = "tensorrt"
"""
    assert parse_cluster((GPUS + text).encode()).workers == (
        WorkersEntry(device="cpu", address=None, count=1),
        WorkersEntry(device="cuda", address=None, count=1, backend="tensorrt", gpus=(1,)),
        WorkersEntry(
            device="cuda", address="10.0.0.2:7070", count=1, backend="cuda", gpus=(1,)
        ),  # another host's
        WorkersEntry(device="cuda:9", address=None, count=1, backend="tensorrt", gpus=(9,)),
    )


def test_without_a_number_workers_have_the_gpus_from_0_on() -> None:
    text = '[[workers]]\ndevice = "cuda"\ncount = 3\nbackend = "tensorrt"'
    (_, entry) = parse_cluster((GPUS + text).encode()).workers
    assert (entry.device, entry.count, entry.gpus) == ("cuda", 3, (0, 1, 2))


def test_each_type_of_gpu_is_planned_by_its_own_profile() -> None:
    file = parse_cluster(GPUS.encode())
    own, measured = profile(), profile(slower=0.1)
    cpu, cuda, other = make_cluster(file, own, {"cuda.json": measured}, 4).types
    assert [kind.name for kind in (cpu, cuda, other)] == ["cpu", "cuda", "cuda:9"]
    np.testing.assert_allclose(cuda.times.segments_s, times_of(measured, 4).segments_s)
    np.testing.assert_allclose(other.times.segments_s * 5, cpu.times.segments_s)
    assert not np.allclose(cuda.times.segments_s, cpu.times.segments_s)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'device = "h100:1"\nbackend = "tensorrt"',
            ("device =", "h100:1", "cpu, cuda, cuda:9", "[devices.h100]"),
        ),
        ('device = "cuda:1"', ("2 device = 'cuda:1'", "GPU 1", "expected backend =", "tensorrt")),
        (
            'device = "cpu"\nbackend = "onnxruntime"',
            ("2 backend = 'onnxruntime'", "tensorrt or cuda", "omit it"),
        ),
        (
            'device = "cuda:1"\nbackend = "cuda"\ncount = 2',
            ("2 names GPU 1", "count = 2", "expected one worker", "own entry"),
        ),
        (
            """device = "cuda"\nbackend = "cuda"\ncount = 2
[[workers]]\ndevice = "cuda:1"\nbackend = "cuda" """,
            ("3 device = 'cuda:1'", "another worker", "cuda:1", "expected a separate GPU"),
        ),
    ],
)
def test_gpus_that_cannot_be_are_refused_in_a_line(text: str, message: Told) -> None:
    with pytest.raises(ClusterFileError, match=facts(*message)) as caught:
        parse_cluster(f"{GPUS}[[workers]]\n{text}".encode(), "c.toml")
    assert str(caught.value).startswith("c.toml [[workers]] ")
    assert "\n" not in str(caught.value)


def test_times_are_of_the_profile_and_of_the_speed() -> None:
    file = parse_cluster(FULL.encode())
    cluster = make_cluster(file, profile(), {"fast.json": profile(slower=0.1)}, 4)
    fast, slow = cluster.types
    np.testing.assert_allclose(fast.times.segments_s[0], [0, 1e-4, 4e-4 / 3, 5e-4 / 3, 2e-4])
    np.testing.assert_allclose(slow.times.segments_s[1], np.array([0, 12, 16, 20, 24]) / 3e3)
    np.testing.assert_allclose(slow.times.exits_s[0, [1, 4]], [1.2e-3, 2.4e-3])
    assert cluster.link_between("slow", "fast").bytes_per_s == 1.25e8
    assert cluster.link_between("fast", "slow").bytes_per_s == 1.25e9


def test_a_profile_of_another_bundle_is_refused() -> None:
    with pytest.raises(ClusterFileError, match=facts("3 segments and 1 exits", "expected 2 and 1")):
        make_cluster(parse_cluster(FULL.encode()), profile(), {"fast.json": profile(3)}, 4)


DEVICE = "[devices.gpu]\ncount = 1\ncost_per_hour = 1\nspeed = 1\n"
WORKERS = DEVICE.replace("count = 1", "count = 2") + '[[workers]]\ndevice = "gpu"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ("c.toml [devices]", "no type", "one at least")),
        ("devices = 3", ("[devices] is an integer", "table")),
        ("a =", ("is not TOML",)),
        ("[device.gpu]", ("'device'", "devices?", "expected devices, link")),
        (DEVICE + "cuont = 1", ("[devices.gpu]", "'cuont'", "count?")),
        (DEVICE.replace("count = 1", ""), ("[devices.gpu]", "no count", "expected")),
        (DEVICE.replace("count = 1", "count = 0"), ("count = 0", "whole number from 1")),
        (DEVICE.replace("count = 1", "count = true"), ("count = True", "whole number")),
        (DEVICE.replace("cost_per_hour = 1", "cost_per_hour = -1"), ("cost_per_hour = -1",)),
        (DEVICE.replace("speed = 1", "speed = 0"), ("speed = 0", "more than 0")),
        (DEVICE.replace("speed = 1", "speed = nan"), ("speed = nan", "number")),
        (DEVICE.replace("speed = 1", ""), ("neither speed nor profile", "expected one")),
        (DEVICE + 'profile = "a"', ("both speed and profile", "expected one")),
        (DEVICE.replace("speed = 1", "profile = 3"), ("profile = 3", "file of a profile")),
        (DEVICE + "[link]\ngbit_per_s = 0", ("[link] gbit_per_s = 0", "more")),
        (DEVICE + "[link]\nmbit = 0", ("[link]", "'mbit'")),
        (DEVICE + "[links]", ("[[links]] is a table", "array of tables")),
        (
            DEVICE + '[[links]]\nfrom = "gpu"',
            ("[[links]] 1 to = None", "expected a type of", "gpu"),
        ),
        (
            DEVICE + 2 * '[[links]]\nfrom = "gpu"\nto = "gpu"\n',
            ("[[links]] 2", "from gpu to gpu", "remove one"),
        ),
        (DEVICE + "[workers]", ("[[workers]] is a table", "array of tables")),
        (DEVICE + "[[workers]]", ("[[workers]] 1 device = None", "expected a type of", "gpu")),
        (WORKERS + "port = 1", ("[[workers]] 1", "'port'", "expected device, address")),
        (WORKERS + "address = 7070", ("address = 7070", '"10.0.0.2:7070"')),
        (WORKERS + "count = 0", ("count = 0", "whole number from 1")),
        (WORKERS + "count = 3", ("1:", "2 of [devices.gpu]", "remove workers")),
        (WORKERS + 'count = 2\naddress = "a:1"', ("one worker at an address", "give")),
        (
            WORKERS + 'address = "a:1"\n[[workers]]\ndevice = "gpu"\naddress = "a:1"',
            ("[[workers]] 2 address = 'a:1'", "occurs twice", "serves one"),
        ),
        (DEVICE + "[[router]]", ("[router] is an array", "table")),
        (DEVICE + '[router]\ntoken = "x"', ("'token'", "token_file?")),
        (DEVICE + "[router]\ntls_ca = 1", ("tls_ca = 1", "name of a file")),
        (DEVICE + "[router]\ninsecure = 1", ("insecure = 1", "true or false")),
        (DEVICE + "[router]\nmost_result_mib = 0", ("most_result_mib = 0", "whole number")),
        (DEVICE + "[router]\nmost_result_mib = 4097", ("whole number from 1 to 4,096",)),
        (DEVICE + "[router]\nmost_result_mib = true", ("most_result_mib = True", "whole")),
        (DEVICE + '[router]\ntls_key = "k"', ("tls_cert and tls_key", "both")),
        (DEVICE + '[router]\ntls_key = "k"\ntls_cert = "c"', ("tls_cert", "tls_ca", "authorities")),
        ('[devices."a\\nb"]', ("1 to 60 printable characters",)),
        (DEVICE.replace("speed = 1", f"speed = {'9' * 400}"), ("1,329 bits",)),
        ("x = " + "[" * 5000, ("nested",)),
    ],
)
def test_what_is_wrong_is_said_in_a_line(text: str, message: Told) -> None:
    with pytest.raises(ClusterFileError, match=facts(*message)) as caught:
        parse_cluster(text.encode(), "c.toml")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("c.toml")


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ClusterFileError, match="is not UTF-8"):
        parse_cluster(b"\xff")
    with pytest.raises(ClusterFileError, match=facts("1,048,577 bytes", "1,048,576")):
        parse_cluster(b"#" * (2**20 + 1))


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, len(FULL)), insert=st.text(max_size=6), cut=st.integers(0, 12))
def test_whatever_is_altered_is_read_or_refused_in_a_line(at: int, insert: str, cut: int) -> None:
    text = FULL[:at] + insert + FULL[at + cut :]
    try:
        content = text.encode()
    except UnicodeEncodeError:
        return
    try:
        file = parse_cluster(content)
    except ClusterFileError as error:
        assert str(error).isprintable()
    else:
        assert all(device.count >= 1 for device in file.devices)
