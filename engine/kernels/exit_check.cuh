// The exit check's dimension reduction (PAME 5.3): scores to confidence. Semantics:
// engine/answers/exit_check.py.
//
// A row is checked by one block, whose result goes into the row's scratch. A block rather than a
// warp: what counts at batch 32 is how long one row takes, and 32 blocks leave three of four
// multiprocessors idle as it is. Of 1000 classes every thread has four, so a row is one load, four
// exps and two exchanges.
#pragma once

#include "arguments.cuh"
#include "reduction.cuh"

// Shared memory of a block.
struct Workspace {
    Summary summaries[32];  // of warps
    int counts[32];         // survivors of warps
    unsigned ticket;
    unsigned published;
    bool last;
};

__device__ __forceinline__ float confidence_of(const Summary& seen, bool logits) {
    if (!logits) return as_confidence(seen.largest);
    // Minus infinity rules a class out; plus infinity is an overflow, of which nothing is known.
    const bool finite = seen.largest > -infinity() && seen.largest < infinity();
    return finite ? as_confidence(1.0f / seen.sum) : 0.0f;
}

// A row, its classes spread over the threads: one pass, whose loads are independent of each other,
// so several are in flight.
template <class Score>
__device__ void classify(const StageEnd& stage, int row, Workspace& shared) {
    const auto* scores = static_cast<const typename Score::Stored*>(stage.scores) +
                         static_cast<long long>(row) * stage.classes;
    Summary seen = nothing_seen();
#pragma unroll 4
    for (int index = threadIdx.x; index < stage.classes; index += blockDim.x) {
        seen = merged(seen, Summary{Score::widen(scores[index]), 1.0f});
    }
    seen = over_block(seen, shared.summaries);
    if (threadIdx.x == 0) {
        stage.scratch->rows[row].confidence = confidence_of(seen, stage.kind == LOGITS);
    }
}

// Does every check_blocks-th row.
template <class Score>
__device__ void check_rows(const StageEnd& stage, int block, Workspace& shared) {
    for (int row = block; row < stage.rows; row += stage.check_blocks) {
        classify<Score>(stage, row, shared);
    }
}

// Threshold check of a row that is classified.
__device__ __forceinline__ bool passes(const StageEnd& stage, int row) {
    return fresh(stage.scratch->rows[row].confidence) >= stage.threshold;
}
