"""Workers that Ray starts, places and counts, each an actor; tensors never pass through Ray.

::

    connection  the connection to a Ray cluster, and its free resources
    launcher    places one worker, starts it there, and starts its successors
    actor       the process on the node: a worker that listens, like ``eeworker``

``ray`` is imported only when a cluster is used.
"""
