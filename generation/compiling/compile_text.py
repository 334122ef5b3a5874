"""The steps of compiling a model that generates text, in order.

1. The unmodified model answers all prompts, with the backend and the scheduler used for serving.
   The states at all exits are recorded.
2. At each exit an adapter learns to predict the model's tokens (self-distillation), or a copy of
   the decoder learns them together with all its exits (CALM 3.2). The copy then reads the model's
   answers, and the states at its exits are recorded.
3. Exits are chosen by the time that they save; this follows from their predictions on tuning
   prompts and from measured costs. The path of thresholds is fixed.
4. Tuning prompts are answered at levels of the path, with skipped layers filled when a token leaves
   (state propagation, CALM 3.3) and with catch-up. Of these two ways, the one that is faster at its
   last level within the bound is kept.
5. The held-out prompts are answered level by level, and the last level that certifies the promise
   is served (:mod:`.promise.text_promise`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from offramp.bundle import NEVER
from offramp.calibration.data.scratch import ScratchSpace
from offramp.certify.decision import FloatArray
from offramp.compiler.common.errors import CompileError
from offramp.compiler.common.progress import SILENT, Progress
from offramp.generation.bundle.generating_bundle import GeneratingBundle
from offramp.generation.bundle.text_model import SkippedLayers, TextCriterion, TextEvidence
from offramp.generation.bundle.writing import check_place, write_generating_bundle
from offramp.generation.compiling.choosing import ChosenExits, choose_exits
from offramp.generation.compiling.costs import TextCosts, measure_costs
from offramp.generation.compiling.decoding import Decoded, decode, losses_of
from offramp.generation.compiling.exit_states import ExitStates, RecordingBackend
from offramp.generation.compiling.likeness import Likeness, find_likeness
from offramp.generation.compiling.prompts import (
    PromptSplit,
    Tokens,
    check_lengths,
    check_tokens,
    read_prompts,
    split_prompts,
)
from offramp.generation.compiling.text_options import (
    TextCompileOptions,
    TextSettings,
    layers_to_try,
    settle,
    with_head_size,
)
from offramp.generation.compiling.trained_exits import TrainedExits, train_exits, train_together
from offramp.generation.graphs.text_graphs import (
    TextExit,
    TextExport,
    TextGraphs,
    cut_export,
    read_export,
)
from offramp.generation.promise.text_promise import (
    TextCertificate,
    TextLosses,
    TextPromise,
    TextRisk,
    certify_levels,
)
from offramp.generation.scheduling import TokenThresholds
from offramp.generation.stages.onnx_text import OnnxTextBackend

_TUNED: Final = 0.7
"""Share of the bound allowed for the risk on tuning prompts, at the level where the two ways to
fill skipped layers are compared. Certification is expected to end at about this level."""
_LEAST_GAIN: Final = 1.0
"""Lowest acceptable speed in tokens per second with exits, relative to the model without exits."""
_BEFORE: Final = 6
"""Certification begins this number of levels before the level of ``_TUNED``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledText:
    """A compiled bundle, and how it was made."""

    bundle: GeneratingBundle
    layers: tuple[int, ...]
    """Layers after which exits were tried."""
    costs: TextCosts
    prompts: PromptSplit
    full: Decoded
    """Tuning prompts, answered by the unmodified model."""
    early: Decoded | None
    """Tuning prompts, answered with exits as they are served; ``None`` if no exit is in use."""
    batch: int
    """Largest number of rows in a measured step."""
    reason: str = ""
    """Reason why no exit is in use."""

    @property
    def speedup(self) -> float | None:
        """Tokens per second relative to the model without exits, measured on tuning prompts."""
        return None if self.early is None else self.early.tokens_per_s / self.full.tokens_per_s


def compile_text(options: TextCompileOptions, progress: Progress = SILENT) -> CompiledText:
    """Compile a model that generates text, and write its bundle.

    Raise CompileError or DataError if model, prompts or options are wrong, BundleError if the
    output cannot be written.
    """
    return _Compiling(options, progress).run()


class _Compiling:
    """One run of ``eecompile generation``: its settings and results so far."""

    def __init__(self, options: TextCompileOptions, progress: Progress) -> None:
        self._options, self._progress = options, progress
        check_place(options.output, overwrite=options.overwrite)
        self._settings: TextSettings = settle(options)
        self._given: TextExport = read_export(options.model)
        self._learned = self._given
        """Export that exits are cut into: the model, or the copy that was trained with them."""
        prompts = read_prompts(options.data, ScratchSpace())
        check_tokens(prompts, self._settings, self._given.decoder.vocabulary)
        self._parts = split_prompts(prompts, options.seed)
        count = len(self._given.decoder.layers)
        if count < 2:
            raise CompileError(
                f"the decoder has {count} layer, expected at least 2: exits are between layers"
            )
        self._layers = layers_to_try(count, options.exits)
        self._likeness: Likeness = find_likeness(options, self._settings)
        self._promise = TextPromise(
            risk=TextRisk(options.promise),
            bound=options.max_disagreement,
            confidence_level=options.confidence_level,
            most_tokens=self._settings.most_tokens,
            binary=self._likeness.differing,
        )
        self._longest = max(len(prompt) for part in self._parts for prompt in part)

    def run(self) -> CompiledText:
        """Run all steps, from decoding the prompts to the certified thresholds."""
        parts = self._parts
        plain = self._backend(self._cut(()))
        self._options = with_head_size(self._options, plain.model)
        check_lengths([prompt for part in parts for prompt in part], plain.longest_prompt)
        recorder = self._recorder()
        self._answers = {
            name: self._decode(f"Answer in full: {name}", backend, prompts)
            for name, backend, prompts in (
                ("train", recorder, parts.train),
                ("tune", recorder, parts.tune),
                ("certify", plain, parts.certify),
            )
        }
        if self._options.train == "joint":
            with self._progress.step("Train the decoder with its exits", 100) as advance:
                self._learned = train_together(
                    self._given,
                    parts.train,
                    [text.tokens for text in self._answers["train"].texts],
                    self._layers,
                    self._options,
                    start_token=self._settings.start_token,
                    advance=advance,
                )
            recorder = self._recorder()
            for name, prompts in (("train", parts.train), ("tune", parts.tune)):
                texts = self._answers[name].texts
                for prompt, text in zip(prompts, texts, strict=True):
                    recorder.given[prompt.tobytes()] = text.tokens
                self._decode("Read the answers with the copy", recorder, prompts)
            recorder.given.clear()
        return self._compile(plain, recorder)

    def _compile(self, plain: OnnxTextBackend, recorder: RecordingBackend) -> CompiledText:
        parts = self._parts
        train, tune = (
            ExitStates(recorder, prompts, self._answers[name].texts)
            for name, prompts in (("train", parts.train), ("tune", parts.tune))
        )
        with self._progress.step("Train the exits", len(self._layers)) as advance:
            trained = train_exits(self._learned, train, tune, self._options, advance)
        costs = self._measure(recorder, plain)
        chosen = choose_exits(
            trained.records(tune, self._options.criterion),
            self._layers,
            costs,
            self._promise,
            differing=self._likeness.differing,
            fills=self._options.skipped != "catch-up",
        )
        full = self._decode("Answer in full, timed", plain, parts.tune)
        if not chosen:
            reason = "no exit brings more than it costs, within the bound"
            return self._written(self._cut(()), costs, full, None, reason=reason)
        graphs, path, first = self._settle(chosen, trained)
        found = self._certify(graphs, path[first:])
        if found is None:
            reason = (
                f"{len(parts.certify)} prompts do not certify the promise at any threshold; pass "
                "more prompts, or a larger --max-disagreement"
            )
            return self._written(self._cut(()), costs, full, None, reason=reason)
        thresholds = path[first + found.level]
        backend = self._backend(graphs)
        early = self._decode("Answer with exits, timed", backend, parts.tune, thresholds)
        evidence = TextEvidence(
            risk=self._promise.risk.value,
            dissimilarity=self._likeness.name,
            bound=self._promise.bound,
            confidence_level=self._promise.confidence_level,
            observed=found.risk,
            prompts=found.prompts,
            layers_run=early.layers_run(len(graphs.model.layers)),
        )
        if early.tokens_per_s <= _LEAST_GAIN * full.tokens_per_s:
            reason = (
                f"within the bound, exits reach {early.tokens_per_s:,.0f} tokens a second, the "
                f"model itself {full.tokens_per_s:,.0f}"
            )
            return self._written(self._cut(()), costs, full, None, reason=reason)
        model = replace(
            graphs.model,
            stages=tuple(
                replace(stage, threshold=float(value))
                for stage, value in zip(graphs.model.stages[:-1], thresholds, strict=True)
            )
            + graphs.model.stages[-1:],
            evidence=evidence,
        )
        return self._written(TextGraphs(model=model, graphs=graphs.graphs), costs, full, early)

    def _settle(
        self, choices: Sequence[ChosenExits], trained: TrainedExits
    ) -> tuple[TextGraphs, FloatArray, int]:
        """Choose exits, and how skipped layers get their keys and values, by measured speed.

        Returns the graphs, their path, and its first level to certify.
        """
        asked = self._options.skipped
        ways: Sequence[SkippedLayers] = ("propagation", "catch-up") if asked == "auto" else (asked,)
        best: tuple[float, TextGraphs, FloatArray, int] | None = None
        for chosen, way in product(choices, ways):
            exits = [trained.exit(number, self._layers[number]) for number in chosen.exits]
            graphs = self._cut(exits, skipped=way)
            level, speed = self._tuned(graphs, chosen.path)
            if best is None or speed > best[0]:
                best = speed, graphs, chosen.path, max(level - _BEFORE, 0)
        assert best is not None, "there is a choice and a way"
        return best[1:]

    def _tuned(self, graphs: TextGraphs, path: FloatArray) -> tuple[int, float]:
        """Return the last level within the bound on tuning prompts, and its tokens per second."""
        backend, prompts = self._backend(graphs), self._parts.tune
        low, high, speed = 0, len(path), 0.0
        while high > low:
            middle = (low + high) // 2
            found = self._decode(f"Tune {graphs.model.skipped}", backend, prompts, path[middle])
            losses = self._losses("tune", found)
            if losses.risk(self._promise.risk) <= _TUNED * self._promise.bound:
                low, speed = middle + 1, found.tokens_per_s
            else:
                high = middle
        return max(low - 1, 0), speed

    def _certify(self, graphs: TextGraphs, path: FloatArray) -> TextCertificate | None:
        """Test levels of a path one after another; ``None`` if the first level does not pass."""
        backend, prompts = self._backend(graphs), self._parts.certify

        def levels() -> Iterator[TextLosses]:
            for number, thresholds in enumerate(path):
                title = f"Certify, level {number + 1}"
                yield self._losses("certify", self._decode(title, backend, prompts, thresholds))

        return certify_levels(levels(), self._promise)

    def _losses(self, name: str, found: Decoded) -> TextLosses:
        wanted = self._answers[name].texts
        return losses_of(found.texts, wanted, self._promise.risk, self._likeness.dissimilarity)

    def _measure(self, recorder: RecordingBackend, plain: OnnxTextBackend) -> TextCosts:
        rows = self._options.batch
        prompts = (self._parts.tune * rows)[:rows]
        answers = [text.tokens for text in self._answers["tune"].texts]
        typical = sorted(answers, key=len)[len(answers) // 2]
        with self._progress.step("Measure layers and exits", 1):
            return measure_costs(recorder, plain, recorder.model, prompts, typical)

    def _decode(
        self,
        title: str,
        backend: OnnxTextBackend,
        prompts: Sequence[Tokens],
        thresholds: FloatArray | None = None,
    ) -> Decoded:
        used = self._thresholds(backend, thresholds)
        with self._progress.step(title, len(prompts)) as advance:
            return decode(
                backend,
                prompts,
                used,
                stop=self._settings.stop_tokens,
                most_tokens=self._settings.most_tokens,
                batch=self._options.batch,
                advance=advance,
            )

    def _thresholds(
        self, backend: OnnxTextBackend, thresholds: FloatArray | None
    ) -> TokenThresholds:
        if thresholds is None:
            return TokenThresholds.off(backend.stages)
        return TokenThresholds(
            version=0,
            by_stage=tuple(thresholds.tolist()),
            decay=self._options.decay,
            most_tokens=self._settings.most_tokens,
        )

    def _cut(
        self,
        exits: Sequence[TextExit],
        *,
        skipped: SkippedLayers = "propagation",
        criterion: TextCriterion | None = None,
    ) -> TextGraphs:
        """Cut a model at exits; without exits, cut the original model, not the trained copy."""
        options, settings = self._options, self._settings
        cut = cut_export(
            self._learned if exits else self._given,
            exits,
            criterion=criterion or options.criterion,
            skipped=skipped,
            start_token=settings.start_token,
            stop_tokens=settings.stop_tokens,
        )
        model = replace(
            cut.model,
            decay=options.decay,
            longest_prompt=self._longest,
            longest_answer=settings.most_tokens,
        )
        return TextGraphs(model=model, graphs=cut.graphs)

    def _backend(
        self, graphs: TextGraphs, kind: Callable[..., OnnxTextBackend] = OnnxTextBackend
    ) -> OnnxTextBackend:
        model = graphs.model
        own = 0 if model.encoder else model.longest_prompt
        return kind(
            model,
            graphs.graphs.__getitem__,
            slots=2 * self._options.batch,
            length=own + model.longest_answer + 1,
            source_length=model.longest_prompt if model.encoder else 0,
        )

    def _recorder(self) -> RecordingBackend:
        exits = [TextExit(layer=layer, threshold=NEVER) for layer in self._layers]
        criterion = self._options.criterion
        if criterion == "learned classifier":  # the classifier is trained later
            criterion = "softmax margin"
        backend = self._backend(self._cut(exits, criterion=criterion), RecordingBackend)
        assert isinstance(backend, RecordingBackend)
        backend.record()
        return backend

    def _written(
        self,
        graphs: TextGraphs,
        costs: TextCosts,
        full: Decoded,
        early: Decoded | None,
        *,
        reason: str = "",
    ) -> CompiledText:
        tokenizer = self._settings.tokenizer
        bundle = write_generating_bundle(
            self._options.output,
            graphs.model,
            graphs.graphs,
            tokenizer=None if tokenizer is None else tokenizer.content,
            overwrite=self._options.overwrite,
        )
        return CompiledText(
            bundle=bundle,
            layers=self._layers,
            costs=costs,
            prompts=self._parts,
            full=full,
            early=early,
            batch=self._options.batch,
            reason=reason,
        )
