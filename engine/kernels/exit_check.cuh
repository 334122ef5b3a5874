// The exit check's dimension reduction (PAME 5.3): scores to confidence and prediction, or to the
// number of principal values at the threshold. Semantics: engine/exit_check.py.
//
// The work is split into units of (row, part of the row). A unit is done by one block; what units
// find goes into the rows' scratch. A block rather than a warp for a row of logits: what counts at
// batch 32 is how long one row takes, and 32 blocks leave three of four multiprocessors idle as it
// is. Of 1000 classes every thread has four, so a row is one load, four exps and two exchanges.
#pragma once

#include "arguments.cuh"
#include "reduction.cuh"

// Shared memory of a block.
struct Workspace {
    Summary summaries[32];  // of warps
    int counts[32];         // of warps
    unsigned ticket;
    unsigned published;
    bool last;
};

__device__ __forceinline__ bool is_classification(const StageEnd& stage) {
    return stage.kind == LOGITS || stage.kind == PROBABILITIES;
}

__device__ __forceinline__ float confidence_of(const Summary& seen, bool logits) {
    if (!logits) return as_confidence(seen.largest);
    // Minus infinity rules a class out; plus infinity is an overflow, of which nothing is known.
    const bool finite = seen.largest > -infinity() && seen.largest < infinity();
    return finite ? as_confidence(1.0f / seen.sum) : 0.0f;
}

// One pass over the classes: loads are independent of each other, so several are in flight.
template <class Score>
__device__ __forceinline__ Summary summary_of(const typename Score::Stored* scores, int first,
                                              int classes, int class_step, long long stride) {
    Summary seen = nothing_seen();
#pragma unroll 4
    for (int index = first; index < classes; index += class_step) {
        seen = merged(seen, Summary{Score::widen(scores[index * stride]), index, 1.0f});
    }
    return seen;
}

// Unit: a row, its classes spread over the threads.
template <class Score>
__device__ void classify(const StageEnd& stage, int row, Workspace& shared) {
    const auto* scores = static_cast<const typename Score::Stored*>(stage.scores) +
                         static_cast<long long>(row) * stage.channels;
    Summary seen = summary_of<Score>(scores, threadIdx.x, stage.channels, blockDim.x, 1);
    seen = over_block(seen, nothing_seen(), shared.summaries);
    if (threadIdx.x == 0) {
        RowScratch& result = stage.scratch->rows[row];
        result.principal = seen.first;
        result.confidence = confidence_of(seen, stage.kind == LOGITS);
    }
}

// Unit: a heat map. Of its k highest values as many reach the threshold as of all its values, but
// k at most: no need to sort.
template <class Score>
__device__ void count_highest(const StageEnd& stage, int row, int map, Workspace& shared) {
    const auto* scores = static_cast<const typename Score::Stored*>(stage.scores) +
                         (static_cast<long long>(row) * stage.channels + map) * stage.positions;
    int found = 0;
#pragma unroll 4
    for (int position = threadIdx.x; position < stage.positions; position += blockDim.x) {
        found += as_confidence(Score::widen(scores[position])) >= stage.threshold;
    }
    found = over_block(found, 0, shared.counts);
    if (threadIdx.x == 0 && found > 0) {
        atomicAdd(&stage.scratch->rows[row].principal, min(found, stage.highest));
    }
}

// Unit: some pixels of a row, one a thread at a time, so that neighbours read neighbours.
template <class Score>
__device__ void count_pixels(const StageEnd& stage, int row, int part, Workspace& shared) {
    const auto* scores =
        static_cast<const typename Score::Stored*>(stage.scores) +
        static_cast<long long>(row) * stage.channels * stage.positions;
    const int begin = part * stage.positions_a_unit;
    const int end = min(begin + stage.positions_a_unit, stage.positions);
    int found = 0;
    for (int position = begin + threadIdx.x; position < end; position += blockDim.x) {
        const Summary seen =
            summary_of<Score>(scores + position, 0, stage.channels, 1, stage.positions);
        found += confidence_of(seen, stage.kind == PIXEL_LOGITS) >= stage.threshold;
    }
    found = over_block(found, 0, shared.counts);
    if (threadIdx.x == 0 && found > 0) {
        // Integers: the sum is the same in whichever order units are done.
        atomicAdd(&stage.scratch->rows[row].principal, found);
    }
}

// Does every check_blocks-th unit.
template <class Score>
__device__ void check_rows(const StageEnd& stage, int block, Workspace& shared) {
    const int units = stage.rows * stage.units_a_row;
    for (int unit = block; unit < units; unit += stage.check_blocks) {
        const int row = unit / stage.units_a_row;
        const int part = unit % stage.units_a_row;
        if (is_classification(stage)) {
            classify<Score>(stage, row, shared);
        } else if (stage.kind == HEAT_MAPS) {
            count_highest<Score>(stage, row, part, shared);
        } else {
            count_pixels<Score>(stage, row, part, shared);
        }
    }
}

// Threshold check of a row whose units are all done.
__device__ __forceinline__ bool passes(const StageEnd& stage, int row) {
    const RowScratch& result = stage.scratch->rows[row];
    return is_classification(stage) ? fresh(result.confidence) >= stage.threshold
                                    : fresh(result.principal) >= stage.count_threshold;
}
