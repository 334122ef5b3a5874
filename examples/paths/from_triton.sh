#!/usr/bin/env bash
# From Triton Inference Server to Offramp, and back.
#
# You have a model repository of ONNX files, clients that use tritonclient, and Prometheus. This script
# serves the repository with eeserve, calls it with the clients that you have, loads and unloads models,
# sets a latency limit, restarts the server, encrypts it, compiles a model with exits, and swaps it in
# under load. At the end it writes the compiled model as a Triton repository and as one ONNX file.
#
#   examples/paths/from_triton.sh                          installs into a temporary folder first
#   PYTHON=.venv/bin/python examples/paths/from_triton.sh  uses what is installed there
#
# It needs bash, curl, openssl and Python 3.11 or newer, takes some minutes on two cores, writes into a
# temporary folder only, and ends with status 0 if every step did what it should.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=examples/paths/common.bash
source examples/paths/common.bash

install_offramp 'tritonclient[grpc,http]'
"$PYTHON" -c 'import tritonclient.grpc, tritonclient.http' || fail "tritonclient is not installed"

# ------------------------------------------------------------------------------------------------
title "The repository, as Triton has it"
mkdir -p "$work"/models/{fashion,scorer}/1
cp examples/fashion/fashion_resnet56.onnx "$work/models/fashion/1/model.onnx"
cat >"$work/models/fashion/config.pbtxt" <<'END'
name: "fashion"
platform: "onnxruntime_onnx"
max_batch_size: 16
input [ { name: "image" data_type: TYPE_UINT8 dims: [ 1, 28, 28 ] } ]
output [ { name: "logits" data_type: TYPE_FP32 dims: [ 10 ] } ]
dynamic_batching { max_queue_delay_microseconds: 500 }
END
cat >"$work/models/scorer/config.pbtxt" <<'END'
name: "scorer"
platform: "onnxruntime_onnx"
max_batch_size: 64
input [ { name: "features" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "scores" data_type: TYPE_FP32 dims: [ 3 ] } ]
END
"$PYTHON" - "$work/models/scorer/1/model.onnx" <<'END'
import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

weights = np.arange(12, dtype=np.float32).reshape(4, 3) / 10
graph = helper.make_graph(
    [
        helper.make_node("MatMul", ["features", "weights"], ["sums"]),
        helper.make_node("Softmax", ["sums"], ["scores"], axis=1),
    ],
    "scorer",
    [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", 4])],
    [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 3])],
    [numpy_helper.from_array(weights, "weights")],
)
opset = helper.make_opsetid("", 17)
onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), sys.argv[1])
END

# eeserve does not read config.pbtxt. Its settings become options: docs/howto/moving.md has a table.
# In the configuration file, [defaults] holds for all models, and [models.NAME] for one of the repository.
read -r grpc_port http_port < <("$PYTHON" - <<'END'
import socket

sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(one.getsockname()[1] for one in sockets))
END
)
grpc=127.0.0.1:$grpc_port
http=127.0.0.1:$http_port
cat >"$work/eeserve.toml" <<END
[server]
model_repository = "models"   # paths are relative to this file
model_control = "explicit"    # --model-control-mode of tritonserver
load_model = ["fashion"]
grpc_port = $grpc_port        # 8001 and 8000 by default, as tritonserver has them
http_port = $http_port
drain_delay_s = 5             # after SIGTERM: not ready, and requests are still answered
shutdown_timeout_s = 20       # after that: the longest wait for requests in flight

[defaults]
max_batch_size = 16
max_queue_delay_ms = 0.5
END

# ------------------------------------------------------------------------------------------------
status() { curl --silent --insecure --output "$work/body" --write-out '%{http_code}' "$1" || true; }

# Start eeserve with further options, and wait until it is ready; $scheme is http or https. Its ports
# open when the models are loaded: give an orchestrator a startup probe, not just a liveness probe.
scheme=http
start() {
    "$commands/eeserve" --config "$work/eeserve.toml" "$@" >>"$work/server.log" 2>&1 &
    server=$!
    for _ in $(seq 240); do
        [ "$(status "$scheme://$http/v2/health/ready")" = 200 ] && return
        kill -0 "$server" 2>/dev/null || fail "eeserve did not start"
        sleep 0.5
    done
    fail "eeserve was not ready within 2 minutes"
}

title "Serve it, and ask what Kubernetes asks"
start
[ "$(status "http://$http/v2/health/live")" = 200 ] || fail "not live"
[ "$(status "http://$http/v2/models/fashion/ready")" = 200 ] || fail "fashion is not ready"
[ "$(status "http://$http/health/ready")" = 200 ] || fail "the probe of deploy/kubernetes fails"
"$PYTHON" - "$grpc" <<'END'
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

# What a probe of the kind `grpc` calls; `service` may name a model.
health = health_pb2_grpc.HealthStub(grpc.insecure_channel(sys.argv[1]))
for service in "", "fashion":
    answer = health.Check(health_pb2.HealthCheckRequest(service=service))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING, (service, answer)
END
echo "live, ready and SERVING"

# ------------------------------------------------------------------------------------------------
title "Call it with tritonclient: only the address is new"
cat >"$work/clients.py" <<'END'
import asyncio
import json
import queue
import sys

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_aio
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

grpc_address, http_address = sys.argv[1:]
images = np.load("examples/fashion/test.npz")["image"]
features = np.ones((2, 4), np.float32)
client = triton_grpc.InferenceServerClient(grpc_address)
rest = triton_http.InferenceServerClient(http_address)


def tensor(module, name, array, datatype):
    made = module.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array)
    return [made]


def pictures(module, count, start=0):
    return tensor(module, "image", images[start : start + count], "UINT8")


# Health, metadata, configuration.
for one in client, rest:
    assert one.is_server_live() and one.is_server_ready()
    assert one.is_model_ready("fashion") and not one.is_model_ready("scorer")
print("server:", rest.get_server_metadata())
metadata = rest.get_model_metadata("fashion")
assert metadata["inputs"][0] == {"name": "image", "datatype": "UINT8", "shape": [-1, 1, 28, 28]}
assert client.get_model_config("fashion").config.max_batch_size == 16

# Inference: both protocols give the same answers; a request above max_batch_size is divided.
answer = client.infer("fashion", pictures(triton_grpc, 40), request_id="one")
logits = answer.as_numpy("logits")
assert logits.shape == (40, 10) and answer.get_response().id == "one"
assert (rest.infer("fashion", pictures(triton_http, 40)).as_numpy("logits") == logits).all()
top = client.infer(
    "fashion",
    pictures(triton_grpc, 1),
    outputs=[triton_grpc.InferRequestedOutput("logits", class_count=2)],
).as_numpy("logits")
assert top[0, 0].decode().endswith(f":{logits[0].argmax()}"), top

# Asynchronous, streamed, asyncio.
answers = queue.Queue()
for index in range(10):
    client.async_infer(
        "fashion", pictures(triton_grpc, 1, index), lambda result, error: answers.put(error or result)
    )
assert all(answers.get(timeout=60).as_numpy("logits").shape == (1, 10) for _ in range(10))
waiting = [rest.async_infer("fashion", pictures(triton_http, 1, index)) for index in range(10)]
for index, one in enumerate(waiting):
    np.testing.assert_allclose(one.get_result().as_numpy("logits")[0], logits[index], atol=1e-3)
client.start_stream(lambda result, error: answers.put(error or result))
for index in range(10):
    client.async_stream_infer("fashion", pictures(triton_grpc, 1, index), request_id=str(index))
order = [answers.get(timeout=60).get_response().id for _ in range(10)]
client.stop_stream()
assert order == [str(index) for index in range(10)], order


async def asynchronously():
    async with triton_aio.InferenceServerClient(grpc_address) as one:
        return await one.infer("fashion", pictures(triton_grpc, 8))


assert asyncio.run(asynchronously()).as_numpy("logits").shape == (8, 10)

# Load and unload; `config` has the keys of [models.NAME], not those of config.pbtxt.
client.load_model("scorer", config=json.dumps({"max_batch_size": 64}))
assert rest.get_model_config("scorer")["max_batch_size"] == 64
scores = rest.infer("scorer", tensor(triton_http, "features", features, "FP32")).as_numpy("scores")
np.testing.assert_allclose(scores.sum(1), 1, rtol=1e-5)
rest.unload_model("scorer")
states = {one["name"]: one["state"] for one in rest.get_model_repository_index()}
assert states == {"fashion": "READY", "scorer": "UNAVAILABLE"}, states
rest.load_model("scorer")

# Statistics.
statistics = client.get_inference_statistics("fashion").model_stats[0].inference_stats
assert statistics.success.count == 34 and statistics.fail.count == 0, statistics


# A latency limit: of the model (default_timeout_microseconds), and of a request. Here the answer must
# exist by then; what cannot be in time is refused at once.
def refused(**options):
    try:
        client.infer("fashion", pictures(triton_grpc, 4000), **options)
    except InferenceServerException as error:
        return error.status() == "StatusCode.DEADLINE_EXCEEDED"
    return False


assert refused(timeout=20_000)  # microseconds
client.load_model("fashion", config=json.dumps({"max_batch_size": 16, "slo_ms": 20}))
assert refused()
client.load_model("fashion")  # the settings of the configuration file again
assert client.infer("fashion", pictures(triton_grpc, 4), timeout=60_000_000).get_response()
END
"$PYTHON" "$work/clients.py" "$grpc" "$http" || fail "a client of Triton"

# ------------------------------------------------------------------------------------------------
title "JSON by curl"
curl --silent --fail "http://$http/v2/models/scorer/infer" --data '{
  "inputs": [{"name": "features", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]
}' | tee "$work/answer.json"
echo
grep -q '"datatype":"FP32","shape":\[1,3\]' "$work/answer.json" || fail "no scores"
curl --silent --fail --request POST --data '{}' "http://$http/v2/repository/models/scorer/unload"
curl --silent --fail --request POST --data '{"parameters": {"config": "{\"slo_ms\": 200}"}}' \
    "http://$http/v2/repository/models/scorer/load"
curl --silent --fail --request POST --data '{}' "http://$http/v2/repository/index"
echo

title "Metrics, on the HTTP port instead of 8002"
# docs/howto/moving.md has a table of Triton's names and these.
curl --silent --fail "http://$http/metrics" >"$work/metrics"
# A model of a repository has its version in its label, so match it: {model=~"fashion:.*"}.
for metric in 'offramp_request_duration_seconds_count{model="fashion:1"}' \
    'offramp_samples_total{model="fashion:1"}' \
    'offramp_queue_duration_seconds_sum{model="fashion:1"}' \
    'offramp_refused_requests_total{code="DEADLINE_EXCEEDED",reason="deadline"}'; do
    grep --fixed-strings "$metric" "$work/metrics" || fail "no metric $metric"
done

# ------------------------------------------------------------------------------------------------
cat >"$work/load.py" <<'END'
"""Send single images until a file exists; print counts, and fail if a request was lost."""

import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

address, end, retry = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "retry"
images = np.load("examples/fashion/test.npz")["image"]
counts = Counter(answered=0, retried=0, lost=0)
versions = Counter()
lock = threading.Lock()


def send(first):
    client = triton.InferenceServerClient(address)
    index = first
    while not end.exists():
        tensor = triton.InferInput("image", [1, 1, 28, 28], "UINT8")
        tensor.set_data_from_numpy(images[index % len(images)][None])
        while True:
            try:
                response = client.infer("fashion", [tensor]).get_response()
            except InferenceServerException as error:
                again = retry and error.status() == "StatusCode.UNAVAILABLE"
                with lock:
                    counts["retried" if again else "lost"] += 1
                if again:
                    time.sleep(0.2)
                    continue
                print(error, file=sys.stderr)
            else:
                with lock:
                    counts["answered"] += 1
                    versions[response.model_version] += 1
            break
        index += 4


threads = [threading.Thread(target=send, args=(first,)) for first in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps({**counts, "versions": versions}))
sys.exit(counts["lost"] > 0 or not counts["answered"])
END

begin_load() {
    rm -f "$work/end"
    "$PYTHON" "$work/load.py" "$grpc" "$work/end" "$1" >"$work/load.log" 2>&1 &
    load=$!
    sleep 3
}

end_load() {
    touch "$work/end"
    wait "$load" || { load="" && fail "requests were lost"; }
    load=""
    cat "$work/load.log"
}

title "An orderly restart under load"
# With one server there is a gap, in which clients try again (UNAVAILABLE). With two behind a load
# balancer there is none: readiness falls first, and requests are answered meanwhile.
begin_load retry
kill -TERM "$server"
sleep 1
[ "$(status "http://$http/v2/health/ready")" = 400 ] || fail "still ready after SIGTERM"
[ "$(status "http://$http/health/ready")" = 503 ] || fail "the probe still says ready"
[ "$(status "http://$http/v2/health/live")" = 200 ] || fail "not live while it stops"
stopped
start
sleep 3
end_load

# ------------------------------------------------------------------------------------------------
title "TLS on both ports"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 \
    -keyout "$work/server.key" -out "$work/server.pem" \
    -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1 2>"$work/openssl.log"
kill -INT "$server" # as SIGTERM, without drain_delay_s
stopped
scheme=https
start --tls-certificate "$work/server.pem" --tls-key "$work/server.key"
curl --silent --fail --cacert "$work/server.pem" "https://$http/v2/models/fashion"
echo
"$PYTHON" - "$grpc" "$http" "$work/server.pem" <<'END' || fail "TLS"
import sys

import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

grpc_address, http_address, authority = sys.argv[1:]
client = triton_grpc.InferenceServerClient(grpc_address, ssl=True, root_certificates=authority)
rest = triton_http.InferenceServerClient(http_address, ssl=True, ssl_options={"ca_certs": authority})
assert client.is_model_ready("fashion") and rest.is_model_ready("fashion")
END
[ "$(status "http://$http/v2/health/live")" = 000 ] || fail "an answer without encryption"
kill -INT "$server"
stopped
scheme=http

# ------------------------------------------------------------------------------------------------
title "Compile the model with exits"
# Without --max-samples all 20,000 are used: the exits become better, and it takes longer.
"$commands/eecompile" "$work/models/fashion/1/model.onnx" --data examples/fashion/calibration.npz \
    --max-samples 8000 --output "$work/fashion.ee" >"$work/compile.log" 2>&1 || fail "eecompile"
grep -A 8 'exits built' "$work/compile.log"

title "Swap it in as version 2, under load, and back"
start
begin_load once
# A folder whose name starts with a dot is no version; renaming it is one step.
cp -r "$work/fashion.ee" "$work/models/fashion/.2.ee"
mv "$work/models/fashion/.2.ee" "$work/models/fashion/2.ee"
curl --silent --fail --request POST --data '{}' "http://$http/v2/repository/models/fashion/load"
sleep 5
end_load
grep -q '"1": [0-9]*' "$work/load.log" || fail "version 1 answered nothing"
grep -q '"2": [0-9]*' "$work/load.log" || fail "version 2 answered nothing"
"$PYTHON" - "$grpc" <<'END' || fail "the answers of version 2"
import sys

import numpy as np
import onnxruntime
import tritonclient.grpc as triton

images = np.load("examples/fashion/test.npz")["image"]
model = onnxruntime.InferenceSession("examples/fashion/fashion_resnet56.onnx")
client = triton.InferenceServerClient(sys.argv[1])
agreed = []
exits = []
for start in range(0, len(images), 40):
    batch = images[start : start + 40]
    tensor = triton.InferInput("image", batch.shape, "UINT8")
    tensor.set_data_from_numpy(batch)
    result = client.infer("fashion", [tensor])
    assert result.get_response().model_version == "2"
    exits += result.get_response().parameters["offramp_exits"].string_param.split(",")
    source = model.run(["logits"], {"image": batch})[0].argmax(1)
    agreed += list(result.as_numpy("logits").argmax(1) == source)
early = np.mean([exit != "-1" for exit in exits])
print(f"{np.mean(agreed):.2%} of {len(images)} answers are the unmodified model's; {early:.0%} left early")
assert np.mean(agreed) >= 0.98 and early > 0.3
END
mv "$work/models/fashion/2.ee" "$work/models/fashion/.2.ee"
curl --silent --fail --request POST --data '{}' "http://$http/v2/repository/models/fashion/load"
curl --silent --fail "http://$http/v2/models/fashion" | grep '"versions":\["1"\]' || fail "no way back"
kill -TERM "$server"
stopped

# ------------------------------------------------------------------------------------------------
title "The other way: a Triton repository, and one ONNX file"
"$commands/eecompile" export "$work/fashion.ee" --data examples/fashion/calibration.npz \
    --triton "$work/exported" --output "$work/fast.onnx" --with-exits >"$work/export.log" 2>&1 ||
    fail "eecompile export"
tail -n 3 "$work/export.log"
find "$work/exported" -type f -printf '%P\n' | sort
grep -q 'max_batch_size' "$work/exported/fashion/config.pbtxt" || fail "no config.pbtxt"
"$PYTHON" - "$work/fast.onnx" "$work/exported/fashion/1/model.onnx" <<'END' || fail "the exported files"
import sys

import numpy as np
import onnxruntime

images = np.load("examples/fashion/test.npz")["image"]
quiet = onnxruntime.SessionOptions()
quiet.log_severity_level = 3
model = onnxruntime.InferenceSession("examples/fashion/fashion_resnet56.onnx")
source = model.run(["logits"], {"image": images})[0].argmax(1)
for path in sys.argv[1:]:
    session = onnxruntime.InferenceSession(path, quiet)
    logits, exits = session.run(["logits", "exit"], {"image": images})
    agreed, early = np.mean(logits.argmax(1) == source), np.mean(exits >= 0)
    print(f"{path.rsplit('/', 1)[1]}: {agreed:.2%} as the unmodified model, {early:.0%} left early")
    assert agreed >= 0.98 and early > 0.3
END

title "All steps passed"
