// One launch after a stage: checks who exits, compacts the rows that go on into the next stage's
// inputs, and writes counts and small results where the host reads them. (PAME 4.2 and 7.1 do it in
// several steps; a launch costs some microseconds, as much as the check itself.)
//
// Needs no header of any toolkit: nvcc and NVRTC both compile it.

#include "row_copy.cuh"
#include "survivors.cuh"

// The number of this block in the order in which blocks begin.
__device__ unsigned take_ticket(Scratch& scratch, Workspace& shared) {
    if (threadIdx.x == 0) shared.ticket = atomicAdd(&scratch.tickets, 1u);
    __syncthreads();
    return shared.ticket;
}

// Counts a check block as finished. True for the last, which then sees what all have written.
__device__ bool last_to_check(const StageEnd& stage, Workspace& shared) {
    if (threadIdx.x == 0) {  // the only thread that writes rows' results
        __threadfence();
        shared.last = atomicAdd(&stage.scratch->checked, 1u) + 1 ==
                      static_cast<unsigned>(stage.check_blocks);
        __threadfence();
    }
    __syncthreads();
    return shared.last;
}

__device__ int wait_for_survivors(Scratch& scratch, Workspace& shared) {
    if (threadIdx.x == 0) {
        while ((shared.published = fresh(scratch.published)) == 0) __nanosleep(40);
        __threadfence();
    }
    __syncthreads();
    return static_cast<int>(shared.published) - 1;
}

// When no block will look at the counters again.
__device__ void reset(Scratch& scratch) {
    scratch.tickets = 0;
    scratch.checked = 0;
    scratch.published = 0;
    scratch.departed = 0;
}

// Blocks take their role by the order in which they begin, not by blockIdx, whose order nobody
// promises: the first check, later ones copy. So whoever waits for the survivors knows that all
// check blocks have begun, hence hold their multiprocessor and finish without waiting for anyone:
// the wait ends however few blocks fit on the device at once. (The same argument as for the
// look-back of single-pass scans.) Check blocks never wait; the last of them finds the survivors.
template <class Score>
__device__ __forceinline__ void stage_end(const StageEnd& stage, Workspace& shared) {
    Scratch& scratch = *stage.scratch;
    const unsigned check_blocks = stage.check_blocks;
    const unsigned copy_blocks = gridDim.x - check_blocks;
    const unsigned ticket = take_ticket(scratch, shared);
    if (ticket < check_blocks) {
        check_rows<Score>(stage, ticket, shared);
        if (!last_to_check(stage, shared)) return;
        const int survivor_count = find_survivors(stage, shared);
        publish(scratch, survivor_count);
        report(stage, survivor_count);
        if (copy_blocks == 0 && threadIdx.x == 0) reset(scratch);
    } else {
        const int survivor_count = wait_for_survivors(scratch, shared);
        const int stride = sizeof(RowScratch) / sizeof(int);
        const RowList survivors{&scratch.rows[0].survivor, stride, survivor_count};
        copy_rows(stage.tensors, stage.tensor_count, survivors, ticket - check_blocks, copy_blocks);
        // Past their wait, blocks have no use for the counters: no need to await the other warps.
        if (threadIdx.x == 0 && atomicAdd(&scratch.departed, 1u) + 1 == copy_blocks) reset(scratch);
    }
}

// The workspace is declared here, not in the template, since the CPU build of the tests gives
// shared variables a section of their own, which those of templates cannot have.
#define STAGE_END(NAME, SCORE)                             \
    extern "C" __global__ void __launch_bounds__(1024)     \
        NAME(const __grid_constant__ StageEnd stage) {     \
        __shared__ Workspace shared;                       \
        stage_end<SCORE>(stage, shared);                   \
    }

STAGE_END(stage_end_float32, Float32)
STAGE_END(stage_end_float16, Float16)
STAGE_END(stage_end_bfloat16, BFloat16)
