"""The statistics of a model in the fields of the protocol (Triton's statistics extension).

=========================  =======================================================================
field                      content
=========================  =======================================================================
``inference_count``        samples that were answered
``execution_count``        runs of stages
``inference_stats``        times of requests: ``success`` from arrival to answer, ``queue`` to the
                           first batch, ``compute_infer`` from there to the answer; ``fail`` counts
                           requests, without a time
``response_stats``         by exit: ``success`` counts the samples answered there,
                           ``compute_infer`` the runs of its stage, with their time
``batch_stats``            empty: batches shrink from stage to stage, and have no single size
=========================  =======================================================================
"""

from __future__ import annotations

from offramp.engine.requests.statistics import Histogram, ModelStatistics
from offramp.proto import messages
from offramp.server.common.catalog import ServedName


def write_statistics(
    served: ServedName, statistics: ModelStatistics, last_answer_s: float
) -> messages.ModelStatistics:
    """Return a version's statistics since it was loaded.

    ``last_answer_s`` is the time of the last answer in seconds since the epoch, 0 if there is none.
    """
    latency, queue = statistics.latency_s, statistics.queue_s
    computing_s = max(latency.total - queue.total, 0.0)
    response = messages.ModelStatistics(
        name=served.name,
        version=served.version,
        last_inference=round(last_answer_s * 1e3),
        inference_count=statistics.answered,
        execution_count=sum(stage.run_s.count for stage in statistics.stages),
        inference_stats=messages.InferStatistics(
            success=_times(latency),
            fail=messages.StatisticDuration(count=statistics.failed_requests),
            queue=_times(queue),
            compute_input=messages.StatisticDuration(count=latency.count),
            compute_infer=messages.StatisticDuration(
                count=latency.count, ns=round(computing_s * 1e9)
            ),
            compute_output=messages.StatisticDuration(count=latency.count),
        ),
    )
    for stage in statistics.stages:
        of_exit = response.response_stats[stage.label]
        of_exit.success.count = stage.answered
        of_exit.compute_infer.CopyFrom(_times(stage.run_s))
    return response


def _times(seconds: Histogram) -> messages.StatisticDuration:
    return messages.StatisticDuration(count=seconds.count, ns=round(seconds.total * 1e9))
