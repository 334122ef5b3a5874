"""Workers that Ray starts, places and counts, each an actor; tensors never pass through Ray.

::

    connection  the connection to a Ray cluster, and what it has free
    launcher    places one worker, starts it there, and starts its successors
    actor       what runs on the node: a worker that listens, as ``eeworker`` is one

``ray`` is imported when a cluster is asked for, and by nothing else.
"""
