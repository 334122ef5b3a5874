"""Worker processes that run stages and may die: on this host, started here, or on other hosts.

::

    backend       the engine's view: a backend whose slots are workers
    slot          the router's side of a slot: runs stages in a worker
    tensors       transfer of tensors to a worker and back: in shared memory, or inline
    launching     protocols of launchers and of running workers
    process       a worker that is a process on this host
    tcp_launcher  a worker on another host
    orders        orders to a worker, one at a time, each with its answer
    worker        the worker itself, and its process on the router's host
    listening     accepts connections, serves one router, and refuses all others
    eeworker      the command of a worker that listens
    handshake     proof of router and worker that they have the token
    tcp           addresses, TLS, and detection of lost hosts
    stages        names of stages, from which a worker makes the same stage
    wire          messages, sans I/O
    transport     connections and shared memory; independent of models

The router owns requests, inputs and waiting rows. A worker writes only to the memory region of a
message, and results are valid only after its reply: a worker that dies before leaves no state.
"""
