"""The policies of the papers, each a small class; see :mod:`offramp.engine.scheduling.factory`."""
