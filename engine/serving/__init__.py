"""Serving: which models an engine serves under which names, and on which of its streams.

::

    versions      what answers under a name: loading beside serving, switching, removing
    model_checks  which models a stream runs: known-good batches, warming up
    availability  for which models requests are taken
    observers     who is shown what is sent to a model
    totals        counts over the versions of a model
"""
