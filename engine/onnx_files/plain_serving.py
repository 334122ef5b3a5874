"""How a bundle without exits is served: in mode off, and one sample at a time where it has to be.

Such are the bundles of ONNX files as they are, and those of models for which no exit pays.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from offramp.bundle import Manifest
from offramp.engine.options import EngineOptions
from offramp.engine.plan import Mode

_log = logging.getLogger(__name__)


def served_mode(manifest: Manifest, mode: Mode) -> Mode:
    """Return the mode that a model is served in: without exits and variants there is only off."""
    return mode if manifest.exits or manifest.variants else Mode.OFF


def options_for(name: str, manifest: Manifest, options: EngineOptions) -> EngineOptions:
    """Return the engine's options with the mode and the batch size that fit a model; log notes."""
    mode = served_mode(manifest, options.mode)
    for note in notes_on(manifest):
        _log.info("%s: %s", name, note)
    if mode is options.mode and not manifest.no_batching:
        return options
    of_model = options.of(name)
    if manifest.no_batching:
        of_model = replace(of_model, max_batch_size=1)
    return replace(options, mode=mode, models={**options.models, name: of_model})


def notes_on(manifest: Manifest) -> tuple[str, ...]:
    """Return sentences on what a bundle without exits is served like, without full stops."""
    if served_mode(manifest, Mode.LEAVE) is not Mode.OFF:
        return ()
    way_on = "its bundle has no exits, as none was worth building"
    if manifest.is_plain:
        file = manifest.source.original_name
        way_on = f"exits come with --learn, or from eecompile {file} --data DATA"
    notes = [f"the unmodified model is served, in mode off: {way_on}"]
    if manifest.no_batching:
        notes.append(f"every sample runs in a batch of its own: {manifest.no_batching}")
    return tuple(notes)
