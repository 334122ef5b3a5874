#!/usr/bin/env bash
# A researcher's path: a threshold controller and a scheduling policy of your own, compared with the
# built-in ones on the shipped example, on recorded inputs, on a shift, and while serving; then the
# raw records of every exit, for policies that you evaluate in numpy.
#
#   examples/paths/own_controller.sh                          installs into a temporary folder first
#   PYTHON=.venv/bin/python examples/paths/own_controller.sh  uses what is installed there
#
# It needs bash and Python 3.11 or newer, takes some minutes on two cores, writes into a temporary
# folder only, and ends with status 0 if every step did what it should.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=examples/paths/common.bash
source examples/paths/common.bash

# shellcheck disable=SC2119  # no further packages
install_offramp

title "A copy of the source, in which we may add files"
copy_source "$work/tree"
cd "$work/tree"
# The copy goes before what is installed: so do its additions, without installing again. In a clone
# of your own, install with `pip install -e '.[compile]' -c constraints.txt` instead.
export PYTHONPATH="$work/tree/src"
PATH=$commands:$PATH

# --- 1. The controller: an extension (CONTRIBUTING.md, "Five recipes") ---------------------------
title "Plug in a controller and a policy"
mkdir own
ln -s ../../own src/offramp/own
echo '"""Extension: a controller of our own."""' > own/__init__.py

cat > own/aimd.py <<'PY'
"""AIMD: thresholds back off quickly where answers got worse, and return slowly."""

from offramp.bundle import NEVER
from offramp.engine.control.static import UncertifiedController, policy_of


class AimdController(UncertifiedController):
    """Scales the distance of every threshold to 1, after each window of audited answers."""

    name = "aimd"

    def __init__(self, policy, *, exits, window=100, step=0.05, backoff=0.5, **limits):
        super().__init__(policy, **limits)
        self._exits, self._window, self._step, self._backoff = exits, window, step, backoff
        self._distance = {a.exit: 1 - a.threshold for a in policy.active if a.threshold < NEVER}
        self._scale = 1.0  # 1: as compiled; towards 0: towards no exits
        self._forget()

    def observe(self, seen):
        """Take samples in the order in which they were started; there is no clock here."""
        self._counters.add(seen, version=self.policy.version)
        mine = seen.take((seen.policy_version == self.policy.version) & ~seen.forced)
        self._samples += len(mine)
        self._audited += int((mine.early & mine.complete).sum())
        self._loss += float(mine.loss.sum())  # an audit with probability q counts as 1/q
        if self._audited >= self._window:
            self._decide()

    def _decide(self):
        disagreement, bound = self._loss / self._samples, self._limits[0]
        worse = disagreement > bound
        self._scale = self._scale * self._backoff if worse else self._scale + self._step
        self._scale = min(self._scale, 2.0)
        thresholds = [max(0.0, 1 - self._scale * d) for d in self._distance.values()]
        self.policy = policy_of(self.policy.version + 1, list(self._distance), thresholds)
        self._counters.tunings += 1
        self._counters.note(
            "tuning", f"{disagreement:.2%} of a window differed; scale {self._scale:.3f}"
        )
        self._forget()

    def _forget(self):
        self._samples, self._audited, self._loss = 0, 0, 0.0

    def state(self):
        """What is kept across a restart."""
        kept = {"scale": self._scale, "counters": self._counters.state()}
        return {**self._kept_policy(), **kept}

    def restore(self, state):
        """Continue; ValueError if the state is not ours."""
        if not isinstance(state.get("scale"), float):
            raise ValueError(f"no state of the aimd controller: it has {sorted(state)}")
        self.policy, _ = self._kept(state, (), exits=self._exits)
        self._scale = state["scale"]
        self._forget()

    def _describe(self):
        return f"scale {self._scale:.3f}"
PY

cat > own/for_control.py <<'PY'
"""Names the controller on the command line of eeserve."""

from offramp.engine.control.controller import ControllerKind
from offramp.own.aimd import AimdController


def _make(task):
    return AimdController(
        task.policy,
        exits=len(task.manifest.exits),
        max_disagreement=task.max_disagreement,
        confidence_level=task.confidence_level,
        # An AIMD that hears little learns late. It may audit more than the audit budget.
        audit_probability=max(task.audit_probability, 0.2),
    )


EXTENSION = (
    ControllerKind(name="aimd", description="AIMD on all thresholds; promises nothing", make=_make),
)
PY

# --- 2. The policy: shortest remaining work first ------------------------------------------------
cat > engine/scheduling/policies/shortest.py <<'PY'
"""Shortest remaining work first."""

from offramp.engine.scheduling.buckets import Bucket
from offramp.engine.scheduling.policies.batching import BatchFormer
from offramp.engine.scheduling.policy_protocol import Merge


class Shortest:
    """Of all batches that could start, the one with least work left per sample."""

    name = "shortest"

    def __init__(self, points, max_batch_size, streams=1):
        self._limit, self._latencies = max_batch_size, points.latencies
        self._former = BatchFormer(max_batch_size, points.latencies, streams)

    def choose(self, waiting, now_s):
        """Choose the next action of a stream without a batch."""
        buckets = [(s, q.most_urgent()) for s, q in enumerate(waiting.buffered) if q.size]
        left = [self._left_s(s, b.size, b.variant) for s, b in buckets]
        fresh = waiting.ready(now_s)
        if isinstance(fresh, Bucket):
            if not left or self._left_s(0, fresh.size, 0) < min(left):
                return self._former.form(waiting.queue, fresh, now_s)
        if left:
            stage, bucket = buckets[left.index(min(left))]
            return Merge(stage, bucket, self._limit)
        return fresh

    def runs_on(self, stage, before, survivors):
        """Survivors wait where less than half of the batch is left."""
        return survivors * 2 >= before

    def _left_s(self, stage, size, variant):
        size, last = min(size, self._limit), self._latencies.last(variant)
        return self._latencies.span_s(stage, last, size, variant) / size
PY

# The tables that name them: extensions and policies.
"$PYTHON" - <<'PY'
from pathlib import Path


def edit(name, *changes):
    path, text = Path(name), Path(name).read_text()
    for before, after in changes:
        if text.count(before) != 1:
            raise SystemExit(f"{name}: expected one {before!r}, found {text.count(before)}")
        text = text.replace(before, after)
    path.write_text(text)


edit(
    "engine/common/extensions.py",
    ('    "offramp.generation",\n', '    "offramp.generation",\n    "offramp.own",\n'),
)
edit(
    "engine/scheduling/policies/policy_names.py",
    ("import batching, merging, slack,", "import batching, merging, shortest, slack,"),
    ("            merging.Rebatch,\n", "            merging.Rebatch,\n            shortest.Shortest,\n"),
)
PY
eeserve_help=$(eeserve --help-all)
grep -q "^ *aimd " <<< "$eeserve_help"

# --- 3. A bundle, quickly: fewer exits and epochs than by default ---------------------------------
title "Compile"
data=examples/fashion
bundle=$work/fashion.ee
eecompile $data/fashion_resnet56.onnx --data $data/calibration.npz --output "$bundle" \
    --epochs 3 --candidates 6

# --- 4. Controllers on recorded inputs, clean, noisy, and clean again -----------------------------
title "Controllers on a shift (agreement measured, savings predicted)"
"$PYTHON" -m benchmarks.adapt "$bundle" --data $data/test.npz --scenario abrupt --samples 4000 \
    --controllers leave,certified,apparate,pame,aimd --tuning-delay 200 --json "$work/adapt.json"

title "Policies on virtual time (simulated)"
eebench simulate "$bundle" --rate 1500 --slo-ms 20 --policy shortest,run-through,refill \
    --json "$work/simulated.json"

# --- 5. Published methods on the same exits -------------------------------------------------------
title "BranchyNet, DeeBERT, PABEE (measured)"
"$PYTHON" -m benchmarks.methods "$bundle" --data $data/test.npz \
    --method branchynet,deebert,pabee --method-data $data/calibration.npz \
    --batch-sizes 1,16 --rounds 2 --samples 2000 --json "$work/methods.json"

# --- 6. Raw records, and policies in numpy --------------------------------------------------------
title "Raw records in numpy, and CALM's rule"
cat > "$work/offline.py" <<'PY'
import sys

import numpy as np
import offramp
import onnxruntime
from offramp.certify import certify, evaluate

bundle = offramp.Bundle.open(sys.argv[1])
manifest, profile = bundle.manifest, bundle.profile()

# The bundle has records of its calibration samples: of those that tuned (1) and certified (2).
records = bundle.records()
rows = records["split"] == 2
confidence = records["confidence"][:, rows]
agrees = records["prediction"][:, rows] == records["final_prediction"][rows]
thresholds = np.full(len(confidence), 2.0)  # above 1: never
for active in bundle.policy.active:
    thresholds[active.exit] = active.threshold
leaves = confidence >= thresholds[:, None]
first = np.where(leaves.any(axis=0), leaves.argmax(axis=0), len(confidence))
errors = int((~np.vstack([agrees, np.ones(rows.sum(), bool)])[first, np.arange(rows.sum())]).sum())
print(f"compiled policy on the certify split: {errors} of {rows.sum()} differ")
assert errors == bundle.policy.promise.certify_errors


# Any other data: segments and exits are ONNX graphs, chained by the names of their tensors.
def run(name, outputs, tensors):
    session = onnxruntime.InferenceSession(bundle.read(name))  # read() puts the weights in
    return session.run(list(outputs), {i.name: tensors[i.name] for i in session.get_inputs()})


images = np.load(sys.argv[2])["image"]
at, logits, confidence = {exit_.after_segment: exit_ for exit_ in manifest.exits}, [], []
tensors = {manifest.inputs[0].name: images}
for segment in manifest.segments:
    (tensor,) = run(segment.file, [segment.output], tensors)
    tensors = {segment.output: tensor}
    if segment.index in at:
        exit_ = at[segment.index]
        answer, sure = run(exit_.file, [exit_.output, exit_.confidence], tensors)
        logits.append(answer)
        confidence.append(sure)
logits, confidence = np.array(logits), np.array(confidence)  # [exits, n, classes], [exits, n]
final = tensor.argmax(axis=1)
agrees = logits.argmax(axis=2) == final
print("agreement of each exit on test data:", agrees.mean(axis=1).round(3))

# Times at batch 1: of the segments up to an exit, and of every exit on the way.
segments = np.array(profile.segments_ms)[:, 0]
exits = np.array(profile.exits_ms)[:, 0]
latency = [segments[: e.after_segment + 1].sum() + exits[: k + 1].sum() for k, e in enumerate(manifest.exits)]
latency = np.array([*latency, segments.sum() + exits.sum()])


def show(name, confidence, thresholds, rows):
    found = evaluate(
        confidence[:, rows], agrees[:, rows], latency, np.asarray(thresholds),
        vanilla_ms=float(profile.source_ms[0]),
    )
    print(f"{name:22}agreement {1 - found.disagreement:.2%}, saved {found.savings:.0%} (predicted)")
    return found


calibrate, unseen = np.arange(2000), np.arange(2000, len(images))
compiled = show("as compiled", confidence, thresholds, unseen)

# CALM for classes: confidence is the difference of the two largest probabilities, one threshold for
# all exits, from a fixed sequence of tests (Learn then Test) at 1 % with 95 % confidence.
p = np.exp(logits - logits.max(axis=2, keepdims=True))
p = np.sort(p / p.sum(axis=2, keepdims=True), axis=2)
margin = (p[..., -1] - p[..., -2]).astype(np.float32)
path = np.repeat(np.linspace(1, 0, 101)[:, None], len(margin), axis=1)
found = certify(path, margin[:, calibrate], agrees[:, calibrate], max_disagreement=0.01)
print(f"CALM's tests end at threshold {found.thresholds[0]:.2f}")
calm = show("CALM", margin, found.thresholds, unseen)
assert compiled.disagreement < 0.02 and calm.disagreement < 0.02 and compiled.savings > 0.3
PY
"$PYTHON" "$work/offline.py" "$bundle" $data/test.npz

# --- 7. Serve with it, clean images and then noisy ones -------------------------------------------
title "Serve with each controller"
"$PYTHON" - $data/test.npz "$work" <<'PY'
import sys

import numpy as np

images = np.load(sys.argv[1])["image"]
noise = np.random.default_rng(0).normal(0, 25, images.shape)
np.savez(f"{sys.argv[2]}/clean.npz", image=images[:2000])
np.savez(f"{sys.argv[2]}/noisy.npz", image=(images + noise).clip(0, 255).astype(np.uint8)[2000:])
PY

serve() { # serve NAME FLAGS…: starts a server, and sets grpc and http
    local log=$work/$1.log
    shift
    eeserve "$@" --grpc-port 0 --http-port 0 2> "$log" &
    server=$!
    for _ in $(seq 120); do
        if grep -q 'ready: gRPC' "$log"; then break; fi
        kill -0 "$server" 2>/dev/null || fail "eeserve ended"
        sleep 0.5
    done
    grpc=$(sed -n 's/.*ready: gRPC on \([^,]*\),.*/\1/p' "$log")
    http=$(sed -n 's|.*status page on http://\([^/]*\)/.*|\1|p' "$log")
    [ -n "$grpc" ] && [ -n "$http" ] || fail "eeserve is not ready"
}
stop() {
    kill -INT "$server"
    stopped
}
metrics() { "$PYTHON" -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())' "http://$http/metrics"; }

for controller in static certified apparate pame aimd; do
    cp -r "$bundle" "$work/$controller.ee"
    serve "$controller" "$work/$controller.ee" --controller "$controller"
    for inputs in clean noisy; do
        eebench load "$grpc" --model "$controller" --data "$work/$inputs.npz" --rate 250 \
            --duration-s 7 --reference "$bundle" --json "$work/$controller.$inputs.json" > /dev/null
    done
    metrics > "$work/$controller.metrics"
    stop
done
grep -E 'tuning|scale' "$work/aimd.log"
grep -E '^offramp_(audited|disagreed|tunings)_total' "$work/aimd.metrics"

# Once more: what the controller learned is read again; and the policy.
serve again "$work/aimd.ee" --controller aimd --policy shortest
eebench load "$grpc" --model aimd --data "$work/noisy.npz" --rate 250 --duration-s 3 \
    --reference "$bundle" --json "$work/again.json" > /dev/null
metrics > "$work/again.metrics"
stop

title "Side by side"
"$PYTHON" - "$work" <<'PY'
import json
import sys
from pathlib import Path

work = Path(sys.argv[1])
print("recorded, clean / noisy / clean again: agreement, time saved (predicted)")
(comparison,) = json.loads((work / "adapt.json").read_text())["comparisons"]
for run in comparison["runs"]:
    parts = [s["whole"] for s in run["score"]["segments"]]
    cells = (f"{p['agreement']:.2%} {p['latency_savings']:4.0%}" for p in parts)
    print(f"  {run['controller']:10}", "   ".join(cells))
    if run["controller"] == "aimd":
        assert run["score"]["policies"] > 1, "aimd never changed a threshold"
print("served (measured): agreement, early, p50 and p99 in ms")
for controller in ("static", "certified", "apparate", "pame", "aimd"):
    cells = []
    for load in ("clean", "noisy"):
        s = json.loads((work / f"{controller}.{load}.json").read_text())["summary"]
        early = 1 - s["exit_shares"].get("final", 0)
        ms = s["latency_ms"]
        cells.append(f"{load} {s['agreement']:.2%} {early:4.0%} {ms['p50']:5.2f} {ms['p99']:6.2f}")
        assert s["agreement"] > 0.9, (controller, load, s["agreement"])
    print(f"  {controller:10}", "   ".join(cells))


def gauges(name, metric):
    lines = (work / f"{name}.metrics").read_text().splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(metric + "{")]


before, after = (gauges(name, "offramp_tunings_total")[0] for name in ("aimd", "again"))
print(f"tunings of aimd: {before:.0f}, and {after:.0f} after the restart")
print("its thresholds:", *(f"{t:.3f}" for t in gauges("again", "offramp_exit_threshold_ratio")[:-1]))
assert after >= before >= 1, "aimd forgot what it had learned"
PY
title "Done"
