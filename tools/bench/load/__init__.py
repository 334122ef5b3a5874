"""A load generator for servers of the Open Inference Protocol.

:mod:`.generator` starts the processes, :mod:`.worker` is what each of them does; what is sent,
noted and counted stands in :mod:`.shares`, :mod:`.request_log` and :mod:`.metrics_poll`.
"""
