"""cluster.toml: what it says, and a line for each way to say it wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
            r"device = .h100:1., expected a type of .*: cpu, cuda, cuda:9; add \[devices.h100\]",
        ),
        (
            'device = "cuda:1"',
            "2 device = 'cuda:1' names GPU 1 and has no backend, expected backend = .tensorrt. or",
        ),
        (
            'device = "cpu"\nbackend = "onnxruntime"',
            "2 backend = 'onnxruntime', expected tensorrt or cuda, on a GPU; leave it out",
        ),
        (
            'device = "cuda:1"\nbackend = "cuda"\ncount = 2',
            "2 names GPU 1 and count = 2, expected one worker on a GPU; give each its own entry",
        ),
        (
            """device = "cuda"\nbackend = "cuda"\ncount = 2
[[workers]]\ndevice = "cuda:1"\nbackend = "cuda" """,
            "3 device = 'cuda:1': another worker has cuda:1 of that host already, expected a GPU",
        ),
    ],
)
def test_gpus_that_cannot_be_are_refused_in_a_line(text: str, message: str) -> None:
    with pytest.raises(ClusterFileError, match=message) as caught:
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
    with pytest.raises(ClusterFileError, match="is of 3 segments and 1 exits, expected 2 and 1"):
        make_cluster(parse_cluster(FULL.encode()), profile(), {"fast.json": profile(3)}, 4)


DEVICE = "[devices.gpu]\ncount = 1\ncost_per_hour = 1\nspeed = 1\n"
WORKERS = DEVICE.replace("count = 1", "count = 2") + '[[workers]]\ndevice = "gpu"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"c.toml \[devices\]: names no type, expected one at least"),
        ("devices = 3", r"\[devices\] is an integer, expected a table"),
        ("a =", "is not TOML"),
        ("[device.gpu]", r"unknown key 'device' \(did you mean devices\?\), expected devices, li"),
        (DEVICE + "cuont = 1", r"\[devices.gpu\]: unknown key 'cuont' \(did you mean count\?\)"),
        (DEVICE.replace("count = 1", ""), r"\[devices.gpu\] has no count; expected for instance"),
        (DEVICE.replace("count = 1", "count = 0"), "count = 0, expected a whole number from 1"),
        (DEVICE.replace("count = 1", "count = true"), "count = True, expected a whole number"),
        (DEVICE.replace("cost_per_hour = 1", "cost_per_hour = -1"), "cost_per_hour = -1, expected"),
        (DEVICE.replace("speed = 1", "speed = 0"), "speed = 0, expected a number of more than 0"),
        (DEVICE.replace("speed = 1", "speed = nan"), "speed = nan, expected a number"),
        (DEVICE.replace("speed = 1", ""), "has neither speed nor profile, expected one"),
        (DEVICE + 'profile = "a"', "has both speed and profile, expected one"),
        (DEVICE.replace("speed = 1", "profile = 3"), "profile = 3, expected the file of a profile"),
        (DEVICE + "[link]\ngbit_per_s = 0", r"\[link\] gbit_per_s = 0, expected a number of more"),
        (DEVICE + "[link]\nmbit = 0", r"\[link\]: unknown key 'mbit'"),
        (DEVICE + "[links]", r"\[\[links\]\] is a table, expected an array of tables"),
        (
            DEVICE + '[[links]]\nfrom = "gpu"',
            r"\[\[links\]\] 1 to = None, expected a type of .*gpu",
        ),
        (
            DEVICE + 2 * '[[links]]\nfrom = "gpu"\nto = "gpu"\n',
            r"\[\[links\]\] 2: from gpu to gpu is there already; leave one out",
        ),
        (DEVICE + "[workers]", r"\[\[workers\]\] is a table, expected an array of tables"),
        (DEVICE + "[[workers]]", r"\[\[workers\]\] 1 device = None, expected a type of .*: gpu"),
        (WORKERS + "port = 1", r"\[\[workers\]\] 1: unknown key 'port', expected device, addr"),
        (WORKERS + "address = 7070", 'address = 7070, expected for instance "10.0.0.2:7070"'),
        (WORKERS + "count = 0", "count = 0, expected a whole number from 1"),
        (WORKERS + "count = 3", r"1: is more than the 2 of \[devices.gpu\]; leave workers out"),
        (WORKERS + 'count = 2\naddress = "a:1"', "expected one worker behind an address; give"),
        (
            WORKERS + 'address = "a:1"\n[[workers]]\ndevice = "gpu"\naddress = "a:1"',
            r"\[\[workers\]\] 2 address = 'a:1': is there already, and a worker serves one",
        ),
        (DEVICE + "[[router]]", r"\[router\] is an array, expected a table"),
        (DEVICE + '[router]\ntoken = "x"', r"unknown key 'token' \(did you mean token_file\?\)"),
        (DEVICE + "[router]\ntls_ca = 1", "tls_ca = 1, expected the name of a file, relative to"),
        (DEVICE + "[router]\ninsecure = 1", "insecure = 1, expected true or false"),
        (DEVICE + "[router]\nmost_result_mib = 0", "most_result_mib = 0, expected a whole number"),
        (
            DEVICE + "[router]\nmost_result_mib = 4097",
            "expected a whole number from 1 to 4,096, which",
        ),
        (DEVICE + "[router]\nmost_result_mib = true", "most_result_mib = True, expected a whole"),
        (DEVICE + '[router]\ntls_key = "k"', "has one of tls_cert and tls_key, expected both"),
        (
            DEVICE + '[router]\ntls_key = "k"\ntls_cert = "c"',
            "has tls_cert and no tls_ca, expected the authorities",
        ),
        ('[devices."a\\nb"]', "expected a name of 1 to 60 printable characters"),
        (DEVICE.replace("speed = 1", f"speed = {'9' * 400}"), "speed = an integer of 1,329 bits"),
        ("x = " + "[" * 5000, "is nested too deep"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(text: str, message: str) -> None:
    with pytest.raises(ClusterFileError, match=message) as caught:
        parse_cluster(text.encode(), "c.toml")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("c.toml")


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ClusterFileError, match="is not UTF-8"):
        parse_cluster(b"\xff")
    with pytest.raises(ClusterFileError, match="has 1,048,577 bytes, expected at most 1,048,576"):
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
