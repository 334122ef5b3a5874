"""Models in this process: answers, threads, errors, and how they end."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from tests.facts import Told, facts, tells
from tests.models import mlp
from tests.small import compile_small
from tests.small_bert import inputs as bert_inputs
from tests.small_bert import small_bert

import offramp
from offramp.api import ForkedError, ModelClosedError
from offramp.api.engine_options import engine_options
from offramp.api.keywords import ServerKeywords
from offramp.bundle import BundleNotFoundError
from offramp.engine.common.errors import BadInputError, DeadlineExceededError
from offramp.engine.core import Engine
from offramp.engine.models.learning_options import LearnOptions
from offramp.engine.models.options import EngineOptions
from offramp.engine.stages.plan import Mode
from offramp.server.arguments import make_parser

Inputs = NDArray[np.float32]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Inputs]:
    """A bundle with an exit in use, and inputs."""
    bundle, inputs = compile_small(tmp_path_factory.mktemp("api"))
    assert bundle.policy.active
    with np.load(inputs) as archive:
        return bundle.path, archive["x"]


@pytest.fixture
def model(small: tuple[Path, Inputs]) -> Iterator[offramp.Model]:
    with offramp.load(small[0], mode="leave") as model:
        yield model


def test_a_bundle_that_was_compiled_is_loaded(small: tuple[Path, Inputs]) -> None:
    with offramp.load(offramp.Bundle.open(small[0]), mode="leave") as model:
        assert model(small[1][:2]).shape == (2, 3)


def by_engine(path: Path, x: Inputs) -> tuple[NDArray[Any], NDArray[np.int32]]:
    async def answer() -> tuple[NDArray[Any], NDArray[np.int32]]:
        async with await Engine.open({"m": path}, EngineOptions(mode=Mode.LEAVE)) as engine:
            result = await engine.infer("m", {"x": x})
            return result.outputs["logits"], result.exits

    return asyncio.run(answer())


def test_a_model_answers_as_the_engine_does(
    small: tuple[Path, Inputs], model: offramp.Model
) -> None:
    path, x = small
    logits, exits = by_engine(path, x)
    result = model.predict({"x": x})
    assert set(exits) == {0, -1}
    assert np.array_equal(result.exits, exits)
    assert np.array_equal(result.outputs["logits"], logits)
    assert (result.confidences[exits == 0] >= model.statistics().stages[0].threshold).all()
    assert np.array_equal(model(x), logits)
    assert np.array_equal(model.predict(x=x).exits, exits)


def test_lists_become_arrays_of_the_inputs_dtype(
    small: tuple[Path, Inputs], model: offramp.Model
) -> None:
    assert np.array_equal(model(small[1][:2].tolist()), model(small[1][:2]))


def test_calls_of_many_threads_share_batches(small: tuple[Path, Inputs]) -> None:
    path, x = small
    rows = [x[n : n + 1] for n in range(64)]
    ready = threading.Barrier(8)

    def ask(which: int) -> list[NDArray[Any]]:
        ready.wait()
        return [model(row) for row in rows[which::8]]

    with (
        offramp.load(path, mode="leave", max_queue_delay_ms=20) as model,
        ThreadPoolExecutor(8) as pool,
    ):
        answers = list(pool.map(ask, range(8)))
        together, counted = model(x[:64]), model.statistics()
    for which, answered in enumerate(answers):
        assert np.allclose(np.concatenate(answered), together[which::8], atol=1e-5)
    assert counted.requests == 65
    first = counted.stages[0].batch_size
    assert first.total == 128
    assert first.count < 65


def test_inputs_outputs_and_how_it_shows_itself(model: offramp.Model) -> None:
    assert [spec.describe() for spec in model.inputs] == ["x: float32 [batch, 16]"]
    assert [spec.describe() for spec in model.outputs] == ["logits: float32 [batch, 3]"]
    assert repr(model) == (
        "<Model small: x: float32 [batch, 16] → logits: float32 [batch, 3], 1 exit in use>"
    )
    shown = model._repr_html_()
    assert "<td>exit 0</td>" in shown
    assert "mode leave, onnxruntime-cpu, 0 samples answered" in shown
    assert "at most 5.00% of answers differ" in shown


def test_an_async_model_answers_on_the_callers_loop(small: tuple[Path, Inputs]) -> None:
    path, x = small
    logits, exits = by_engine(path, x)

    async def ask() -> None:
        async with offramp.AsyncModel.open(path, mode="leave") as model:
            result = await model.predict(x=x)
            assert np.array_equal(result.outputs["logits"], logits)
            assert np.array_equal(result.exits, exits)
            assert np.array_equal(await model(x), logits)
            assert model.statistics().answered == 2 * len(x)
            assert "2,1" not in model._repr_html_()
            together = await asyncio.gather(*(model(x[n : n + 1]) for n in range(16)))
            assert np.allclose(np.concatenate(together), logits[:16], atol=1e-5)
        with pytest.raises(ModelClosedError, match="small was closed; open it again"):
            await model(x)
        opened = await offramp.AsyncModel.open(path, mode="off")
        assert set((await opened.predict(x=x)).exits) == {-1}
        await opened.close()
        await opened.close()

    asyncio.run(ask())


def names_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_closing_ends_the_threads_and_a_later_call_says_so(small: tuple[Path, Inputs]) -> None:
    offramp.load(small[0]).close()  # OpenVINO starts a thread when it is imported, which stays
    before = names_of_threads()
    model = offramp.load(small[0])
    assert "the model small" in names_of_threads() - before
    model.close()
    model.close()
    assert names_of_threads() == before
    with pytest.raises(ModelClosedError, match="small was closed; open it again"):
        model(small[1])
    with pytest.raises(ModelClosedError, match="small was closed"):
        model.statistics()


def test_a_model_that_is_forgotten_is_closed(small: tuple[Path, Inputs]) -> None:
    offramp.load(small[0]).close()  # as above
    before = names_of_threads()
    model = offramp.load(small[0])
    assert names_of_threads() > before
    del model
    gc.collect()
    assert names_of_threads() == before


def test_a_program_that_forgets_to_close_ends(small: tuple[Path, Inputs]) -> None:
    code = (
        "import offramp, numpy as np, sys\n"
        f"model = offramp.load({str(small[0])!r}, mode='leave')\n"
        "print(model(np.zeros((2, 16), np.float32)).shape)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "(2, 3)\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_must_open_the_model_itself(
    small: tuple[Path, Inputs], model: offramp.Model
) -> None:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that is what is tested here
        child = os.fork()
    if child == 0:
        try:
            model(small[1])
        except ForkedError as error:
            os.write(writing, str(error).encode())
            model.close()  # leaves what the parent has
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        tells(told.read(), "small", f"process {os.getpid()}", f"{child}", "after the fork")
    os.waitpid(child, 0)
    assert model(small[1]).shape == (400, 3)


def test_a_model_with_several_inputs(tmp_path: Path) -> None:
    path, arrays = small_bert(tmp_path).path, bert_inputs(4)
    with offramp.load(path, mode="leave", state=False) as model:
        assert len(model.predict(arrays).exits) == 4
        assert np.array_equal(model.predict(**arrays).exits, model.predict(arrays).exits)
        with pytest.raises(TypeError, match=facts("3 inputs", "one", "model.")):
            model(arrays["input_ids"])


Wrong = Callable[[offramp.Model, Inputs], object]


@pytest.mark.parametrize(
    ("wrong", "kind", "told"),
    [
        (
            lambda model, x: model(x.astype(np.float64)),
            BadInputError,
            ("'x' is float64 [400, 16]", "x: float32 [batch, 16]", "convert it"),
        ),
        (lambda model, x: model(x[0]), BadInputError, ("single sample", "batch dimension")),
        (lambda model, x: model.predict(X=x), BadInputError, ("'X'", "x: float32")),
        (lambda model, x: model.predict(), BadInputError, ("'x' is missing", "x:")),
        (
            lambda model, x: model.predict(x),  # type: ignore[arg-type]
            TypeError,
            ("ndarray", "{'x': …}"),
        ),
        (
            lambda model, x: model.predict({"x": x}, deadline_ms=-1),
            DeadlineExceededError,
            ("deadline",),
        ),
    ],
)
def test_wrong_calls(
    small: tuple[Path, Inputs],
    model: offramp.Model,
    wrong: Wrong,
    kind: type[Exception],
    told: Told,
) -> None:
    with pytest.raises(kind, match=facts(*told)):
        wrong(model, small[1])
    assert model(small[1]).shape == (400, 3)


@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ({"max_batchsize": 8}, TypeError, ("load()", "'max_batchsize'", "max_batch_size")),
        (
            {"mode": "fast"},
            ValueError,
            ("mode is 'fast'", "'audit' or 'release' or 'leave' or 'off'"),
        ),
        ({"threads": "2"}, ValueError, ("threads is '2'", "integer or None")),
        ({"streams": True}, TypeError, ("streams is True", "integer")),
        ({"padding": 1}, TypeError, ("padding is 1", "True or False")),
        ({"max_batch_size": 0}, ValueError, ("max_batch_size is 0", "at least 1")),
        ({"policy": "slakfit"}, ValueError, ("'slakfit'", "'slackfit'")),
        (
            {"mode": "leave", "confidence": 0.9},
            ValueError,
            ("confidence", "mode leave", "choose mode audit or release"),
        ),
        (
            {"policy": "cheapest", "forbid_forced_exits": True},
            ValueError,
            ("cheapest", "forces exits"),
        ),
        (
            {"padding": False, "device": "cuda:0", "backend": "onnxruntime"},
            ValueError,
            ("device", "backend onnxruntime", "CPU", "leave it out"),
        ),
        (
            {"learn_samples": 100},
            ValueError,
            ("learn_samples without learn", "leave it out", "add learn"),
        ),
        ({"learn": True}, ValueError, ("learn", "MODEL.onnx", "bundles")),
        ({"backend": "tpu"}, Exception, ("'tpu'",)),
    ],
)
def test_wrong_options(
    small: tuple[Path, Inputs], options: dict[str, Any], kind: type[Exception], told: Told
) -> None:
    with pytest.raises(kind, match=facts(*told)):
        offramp.load(small[0], **options)
    with pytest.raises(kind, match=facts(*told).replace("load", "AsyncModel.open")):
        asyncio.run(opened(small[0], **options))


async def opened(path: Path, **options: Any) -> None:
    await offramp.AsyncModel.open(path, **options)


def test_an_onnx_file_is_answered_by_the_model_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "plain.onnx"
    onnx.save(mlp(layers=2, classes=3), path)
    x = np.random.default_rng(0).standard_normal((6, 16)).astype(np.float32)
    session = onnxruntime.InferenceSession(path)
    with offramp.load(path) as model:
        assert model.name == "plain"
        result = model.predict(x=x)
        assert "exits in use: 0; the unmodified model answers" in model._repr_html_()
        assert model.statistics().mode == "off"
    (wanted,) = session.run(None, {"x": x})
    assert np.allclose(result.outputs["logits"], wanted, rtol=1e-5, atol=1e-6)
    assert set(result.exits) == {-1}
    assert [each.name for each in tmp_path.iterdir()] == ["plain.onnx"]


def test_learning_is_asked_for_by_the_flags_names(tmp_path: Path) -> None:
    path = tmp_path / "plain.onnx"
    onnx.save(mlp(layers=2, classes=3), path)
    with pytest.raises(ValueError, match="samples 0 is not in 1 to"):
        offramp.load(path, learn=True, learn_samples=0)
    options = engine_options(
        "load",
        {"learn": True, "learn_samples": 700, "learn_folder": str(tmp_path), "learn_gib": 1.5},
        [path],
    )
    assert options.learning == LearnOptions(samples=700, folder=tmp_path, max_gib=1.5)


def test_a_path_without_a_bundle(tmp_path: Path) -> None:
    before = names_of_threads()
    with pytest.raises(BundleNotFoundError, match=r"nothing\.ee is not a bundle"):
        offramp.load(tmp_path / "nothing.ee")
    assert names_of_threads() == before


def test_importing_offramp_imports_nothing_large() -> None:
    code = (
        "import sys, offramp\n"
        "large = {'numpy', 'onnxruntime', 'onnx', 'torch', 'grpc', 'asyncio', 'offramp.api'}\n"
        "print(sorted(large & set(sys.modules)), sorted(offramp.__all__) == offramp.__all__)\n"
        "print(set(offramp.__all__) <= set(dir(offramp)), 'numpy' in sys.modules)\n"
        "offramp.load; print(sorted({'onnx', 'torch', 'grpc'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "[] True\nTrue False\n[]\n"


def test_an_unknown_name_of_the_package() -> None:
    with pytest.raises(AttributeError, match="module 'offramp' has no attribute 'lod'"):
        offramp.lod  # noqa: B018
    assert all(getattr(offramp, name) is not None for name in offramp.__all__)


NOT_KEYWORDS = {
    *("--help", "--help-all", "--version", "--completion", "--self-check", "--json"),
    *("--log-level", "--log-format", "--access-log"),  # a program sets its own logging up
    *("--grpc-port", "--http-port"),  # arguments of serve, with defaults of their own
    *("--model", "--config"),  # models are an argument
    *("--cluster", "--ray-address", "--plan", "--forecast"),  # for servers
    *("--model-repository", "--model-control", "--load-model", "--model-versions"),  # likewise
    *("--tls-certificate", "--tls-key", "--tls-client-ca", "--token-file", "--admin-token-file"),
    *("--repository-poll-s", "--trace-endpoint", "--trace-rate"),
    *("--custom-ops", "--criterion-module"),  # code: using_libraries and register
    "--drain-delay-s",  # nobody looks for another server
}


def test_every_flag_of_a_server_is_a_keyword() -> None:
    actions = make_parser()._actions
    flags = {flag for action in actions for flag in action.option_strings if len(flag) > 2}
    flags = {flag for flag in flags if "grpc-keepalive" not in flag and "grpc-http2" not in flag}
    assert flags >= NOT_KEYWORDS
    keywords = {f"--{flag.removeprefix('--no-').removeprefix('--')}" for flag in flags}
    known = {f"--{name.replace('_', '-')}" for name in get_type_hints(ServerKeywords)}
    assert keywords - NOT_KEYWORDS == known
