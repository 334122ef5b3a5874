"""Serving: the models that an engine serves, by name, and the streams that run them.

::

    versions       versions of a model by name: loading while serving, switching, removing
    executor       calls from the event loop; stream_thread: the thread of each stream
    stream_checks  models that each stream runs: known-good batches, warm-up
    availability   models that accept requests
    observers      observers of the requests to a model
    totals         counts over all versions of a model
"""
