"""Stages run in worker processes, which may die: on this host, started here, or on others.

::

    backend       what the engine sees: a backend whose slots are workers
    slot          runs stages in a worker
    tensors       how tensors get there and back: in memory that both have, or inline
    launching     what starts a worker, and what the router then has of it
    process       a worker that is a process on this host
    tcp_launcher  a worker on another host
    orders        one order to a worker at a time, each with its answer
    worker        what runs stages, and its process on the router's host
    listening     takes connections, serves one router, and refuses all others
    eeworker      the command of a worker that listens
    handshake     how router and worker show each other that they have the token
    tcp           addresses, TLS, and how a host that is gone is noticed
    stages        how a stage is named, so that a worker makes the same one
    wire          messages, sans I/O
    transport     connections and shared memory; knows nothing of models

The router owns requests, inputs and what waits. A worker writes nowhere but in the region that a
message gives it, and its reply is what counts: a worker that ends before leaves nothing behind.
"""
