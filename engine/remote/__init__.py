"""Stages run in worker processes, which may die: a router here, and the process that it starts.

May import: certify, bundle, engine, engine.backends.

::

    backend    what the engine sees: a backend whose slots are workers
    slot       runs stages in a worker, on tensors in memory that both have
    launching  what starts a worker, and what the router then has of it
    tensors    how tensors get to a worker: in shared memory, or inline
    process    starts a worker, asks it, and ends it
    worker     the process: opens bundles, loads stages, runs them
    stages     how a stage is named, so that a worker makes the same one
    wire       messages, sans I/O
    transport  connections and shared memory; knows nothing of models

The router owns requests, inputs and what waits. A worker writes nowhere but in the region that a
message gives it, and its reply is what counts: a worker that ends before leaves nothing behind.
"""
