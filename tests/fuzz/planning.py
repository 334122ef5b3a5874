"""Campaigns against what planning reads: cluster files, plans, and batch profiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Final

from offramp.bundle import Profile
from offramp.cluster.planning.batch_profile import (
    BatchProfile,
    BatchProfileError,
    ProfileWindow,
    dump_batch_profile,
    parse_recorded,
)
from offramp.cluster.planning.cluster import ModelFacts
from offramp.cluster.planning.cluster_file import parse_cluster
from offramp.cluster.planning.cluster_plan import (
    ClusterPlan,
    PlanError,
    PlannedSplit,
    Replicas,
    dump_plan,
    parse_plan,
)
from offramp.cluster.planning.cluster_times import make_cluster
from offramp.cluster.planning.forecasting import LastValue, forecast_continue_shares
from offramp.cluster.planning.goal import PlanningGoal
from offramp.cluster.planning.optimiser import make_cluster_plan
from tests.fuzz.campaign import WrongError
from tests.fuzz.files import one_line
from tests.fuzz.mutators import havoc

_PROFILE: Final = Profile(
    device="cpu",
    threads=1,
    batch_sizes=(1, 4),
    source_ms=(2.0, 4.0),
    segments_ms=((1.0, 2.0), (1.0, 2.0)),
    exits_ms=((0.1, 0.2),),
    stages_ms=((0.1, 0.1),),
)
_MODEL: Final = ModelFacts(segments=2, exit_after=(0,), going_on=(0.4,), row_bytes=(64.0,))
_LINES: Final = (
    *("[devices.a]", "[devices.b]", '[devices.""]', "[link]", "[[links]]", "[devices]", "[x]"),
    *('from = "a"', 'to = "b"', 'from = "c"', "speed = 0.5", 'profile = "p.json"', "count = 3"),
    *("cost_per_hour = 0", "cost_per_hour = 1e308", "speed = 1e-300", "speed = 1e11", "count = 0"),
    *("memory_gib = 1e-300", "memory_gib = inf", "gbit_per_s = 1e-11", "latency_ms = 1e12"),
    *("count = 99999", "count = " + "9" * 400, "speed = nan", "latency_ms = -1", "a.b = 1"),
)


class ClusterFiles:
    """``cluster.toml``; what is read is planned on, too."""

    def seeds(self) -> Sequence[bytes]:
        """See :class:`tests.fuzz.campaign.Campaign`."""
        text = "[devices.a]\ncount = 2\ncost_per_hour = 1.5\nspeed = 2\nmemory_gib = 8\n"
        text += "[devices.b]\ncount = 3\ncost_per_hour = 0.5\nspeed = 1\n"
        text += '[link]\ngbit_per_s = 10\n[[links]]\nfrom = "a"\nto = "b"\nlatency_ms = 1\n'
        return [text.encode(), b"", b"[devices]\n"]

    def mutate(self, case: bytes, random: Random) -> bytes:
        """See :class:`tests.fuzz.campaign.Campaign`."""
        if random.random() < 0.4:
            return havoc(case, random)
        lines = case.split(b"\n")
        place = random.randrange(len(lines) + 1)
        lines[place : place + random.randrange(2)] = [random.choice(_LINES).encode()]
        return b"\n".join(lines)[:100_000]

    def check(self, case: bytes) -> str:
        """See :class:`tests.fuzz.campaign.Campaign`."""
        try:
            file = parse_cluster(case)
            named = {entry.profile for entry in file.devices if entry.profile is not None}
            cluster = make_cluster(file, _PROFILE, dict.fromkeys(named, _PROFILE), 4)
            goal = PlanningGoal(batch_sizes=(1, 4))
            plan = make_cluster_plan(_MODEL, cluster, goal).plan
        except PlanError as error:
            return one_line(error)
        if not (0 < plan.period_s < math.inf and parse_plan(dump_plan(plan)) == plan):
            raise WrongError(f"a plan that is none: {plan!r:.200}")
        return f"planned:{len(plan.splits)}"

    def close(self) -> None:
        """See :class:`tests.fuzz.campaign.Campaign`."""


class PlanningJson:
    """Plans and batch profiles as JSON."""

    def seeds(self) -> Sequence[bytes]:
        """See :class:`tests.fuzz.campaign.Campaign`."""
        replicas = Replicas(device_type="a", count=2, exits=(0,), stage_s=1e-3, longest_s=2e-3)
        split = PlannedSplit(
            first_segment=0, last_segment=1, replicas=(replicas,), share=1.0, period_s=1e-3,
            fill_s=0.0, link_period_s=0.0, link_s=0.0,
        )  # fmt: skip
        plan = ClusterPlan(batch_size=4, splits=(split,), cost_per_hour=1.0)
        window = ProfileWindow(start_s=1.0, decided=(4, 2), went_on=(2, 0))
        profile = BatchProfile(window_s=120.0, exits=2, windows=(window, window))
        return [dump_plan(plan).encode(), dump_batch_profile(profile).encode(), b"{}"]

    def mutate(self, case: bytes, random: Random) -> bytes:
        """See :class:`tests.fuzz.campaign.Campaign`."""
        return havoc(case, random)[:100_000]

    def check(self, case: bytes) -> str:
        """See :class:`tests.fuzz.campaign.Campaign`."""
        text = case.decode(errors="replace")
        try:
            plan = parse_plan(text)
        except PlanError as error:
            refused = one_line(error)
        else:
            if not (0 < plan.period_s < math.inf):
                raise WrongError(f"a period of {plan.period_s}")
            return "plan"
        try:
            profile = parse_recorded(text).profile
        except BatchProfileError as error:
            return f"{refused}, {one_line(error)}"
        shares = forecast_continue_shares(profile, LastValue())
        if not all(0 <= share <= 1 for share in shares):
            raise WrongError(f"shares {shares}")
        return "batch profile"

    def close(self) -> None:
        """See :class:`tests.fuzz.campaign.Campaign`."""
