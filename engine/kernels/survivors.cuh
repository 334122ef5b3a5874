// From checked rows to the list of those that go on, and to what the host reads. One block's work.
#pragma once

#include "exit_check.cuh"

// Writes the rows that go on, in their order, into the scratch, and gives their number. Blockwise
// scan, as many rows at a time as there are threads.
__device__ int find_survivors(const StageEnd& stage, Workspace& shared) {
    int found = 0;
    for (int first = 0; first < stage.rows; first += blockDim.x) {
        const int row = first + threadIdx.x;
        const bool stays = row < stage.rows && !passes(stage, row);
        const unsigned of_warp = __ballot_sync(ALL_LANES, stays);
        if (lane_number() == 0) shared.counts[warp_number()] = __popc(of_warp);
        __syncthreads();
        int place = found + __popc(of_warp & ((1u << lane_number()) - 1));
        for (int warp = 0; warp < warp_count(); ++warp) {
            if (warp < warp_number()) place += shared.counts[warp];
            found += shared.counts[warp];
        }
        if (stays) stage.scratch->rows[place].survivor = row;
        __syncthreads();  // before counts is written again
    }
    return found;
}

// Tells the waiting copy blocks. Every thread's survivors must be visible before the number is: the
// barrier puts them before the fence, and a fence covers what its thread has been shown.
__device__ void publish(Scratch& scratch, int survivor_count) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicExch(&scratch.published, survivor_count + 1u);
    }
}

// Writes what the host reads. Here, by one block, and after the survivors are published:
// neighbouring threads write neighbouring words, which is few transactions if they go over the bus
// to pinned memory, and no fence has to wait for them.
__device__ void report(const StageEnd& stage, int survivor_count) {
    for (int row = threadIdx.x; row < stage.rows; row += blockDim.x) {
        const RowScratch& result = stage.scratch->rows[row];
        stage.confidence[row] = fresh(result.confidence);
        if (row < survivor_count) stage.survivors[row] = fresh(result.survivor);
    }
    if (threadIdx.x == 0) *stage.survivor_count = survivor_count;
}
