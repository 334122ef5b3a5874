"""A load generator for servers of the Open Inference Protocol.

:mod:`.generator` starts the processes, :mod:`.worker` is what each of them does; what is sent, read
and counted stands apart from it in :mod:`.dealing`, :mod:`.requests`, :mod:`.replies`,
:mod:`.ledger` and :mod:`.metrics_poll`, which do no input or output.
"""
