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
    """Return the options that a model is served with, and log where they are not those asked for.

    ``options`` are those of the engine, of which mode and batch size may not fit the model.
    """
    mode, of_model = served_mode(manifest, options.mode), options.of(name)
    if mode is not options.mode:
        _log.info("%s: serving the unmodified model, in mode off: %s", name, _way_on(manifest))
    if manifest.no_batching:
        _log.warning("%s: every sample runs in a batch of its own: %s", name, manifest.no_batching)
        of_model = replace(of_model, max_batch_size=1)
    if mode is options.mode and of_model is options.of(name):
        return options
    return replace(options, mode=mode, models={**options.models, name: of_model})


def _way_on(manifest: Manifest) -> str:
    """Return why there are no exits, and how to get some."""
    if not manifest.is_plain:
        return "its bundle has no exits, as none pays"
    file = manifest.source.original_name
    return f"exits come with --learn, or from eecompile {file} --data DATA"
