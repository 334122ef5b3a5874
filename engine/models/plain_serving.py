"""Serving of a bundle whose exits may not answer: in mode off, or one sample at a time.

Such bundles come from unchanged ONNX files, from models without a profitable exit, and from dry
runs, whose exits were made on random inputs.
"""

from __future__ import annotations

import logging
import shlex
from dataclasses import replace
from pathlib import Path

from offramp.bundle import Manifest
from offramp.engine.models.options import EngineOptions
from offramp.engine.stages.plan import Mode

_log = logging.getLogger(__name__)


def served_mode(manifest: Manifest, mode: Mode, *, uncertified: bool = False) -> Mode:
    """Return the mode in which a model is served: off if no exit of the model may answer.

    Exits of a dry run may answer if this is allowed although nothing is certified
    (``uncertified``).
    """
    if not (manifest.exits or manifest.variants):
        return Mode.OFF
    return Mode.OFF if manifest.calibration.random_inputs and not uncertified else mode


def options_for(
    name: str, manifest: Manifest, options: EngineOptions, file: Path | None = None
) -> EngineOptions:
    """Return the engine's options with a mode and batch size that fit the model; log notes.

    ``file`` is the path of the user's ONNX file, for notes; ``None`` if it is not known.
    """
    level = logging.WARNING if manifest.calibration.random_inputs else logging.INFO
    uncertified = options.uncertified_exits
    for note in notes_on(name, manifest, options, file):
        _log.log(level, "%s: %s", name, note)
    mode = served_mode(manifest, options.mode, uncertified=uncertified)
    if mode is options.mode and not manifest.no_batching:
        return options
    of_model = options.of(name)
    if manifest.no_batching:
        of_model = replace(of_model, max_batch_size=1)
    return replace(options, mode=mode, models={**options.models, name: of_model})


def notes_on(
    name: str, manifest: Manifest, options: EngineOptions, file: Path | None = None
) -> tuple[str, ...]:
    """Return sentences, without full stops, on how a model whose exits may not answer is served."""
    if manifest.calibration.random_inputs:
        answered = (
            "the unmodified model is served, in mode off; --uncertified-exits lets exits answer"
        )
        if options.uncertified_exits:
            answered = "exits answer, as --uncertified-exits asks for"
        return (f"compiled on random inputs: nothing is certified; {answered}",)
    if manifest.exits or manifest.variants:
        return ()
    way_on = "its bundle has no exits, as none was worth building"
    if manifest.is_plain:
        model = shlex.quote(str(file or manifest.source.original_name))
        way_on = f"exits come with --learn, or from eecompile {model} --data DATA"
        if options.learning is not None and options.of(name).learn:
            way_on = "exits are learned from requests"
    notes = [f"the unmodified model is served, in mode off: {way_on}"]
    if manifest.no_batching:
        notes.append(f"every sample runs in a batch of its own: {manifest.no_batching}")
    return tuple(notes)
