// What the host hands to the kernels, by value, and the scratch block that they keep between
// their blocks. Mirrored by kernel_arguments.py; a test compares both field by field.
#pragma once

constexpr int MOST_TENSORS = 16;

// What the scores are. As CheckKind in kernel_arguments.py.
enum Kind : int {
    LOGITS = 0,         // confidence: largest softmax probability
    PROBABILITIES = 1,  // confidence: largest probability
};

// A tensor whose rows are copied. Source and target must not overlap.
struct RowCopy {
    const void* source;
    void* target;
    unsigned long long row_bytes;  // may be 0
};

// One row's results, until the host has them.
struct RowScratch {
    float confidence;
    int survivor;  // not of this row: the survivor that this place in their list holds
};

// One a stream: launches that overlap must not share it. All zero before the first launch; every
// launch leaves the counters so that the next one can start, hence no memset between them and nothing in the
// way of a CUDA graph. Every counter has a cache line (128 bytes) to itself: some blocks spin on
// one while others count in another.
struct Scratch {
    alignas(128) unsigned tickets;    // blocks that have begun
    alignas(128) unsigned checked;    // check blocks that have finished
    alignas(128) unsigned published;  // 0 until the survivors are known, then their number + 1
    alignas(128) unsigned departed;   // copy blocks that have finished
    alignas(128) RowScratch rows[1];  // as many as the largest batch has
};

// What other blocks may have written: from L2, as it is now.
template <class Value>
__device__ __forceinline__ Value fresh(const Value& place) {
    return *static_cast<const volatile Value*>(&place);
}

struct StageEnd {
    const void* scores;   // [rows, classes], dense
    float* confidence;    // [rows]
    int* survivors;       // [rows] row numbers that go on, rising; the first so many
    int* survivor_count;  // [1]
    Scratch* scratch;
    int kind;
    int rows;
    int classes;
    float threshold;   // confidence threshold
    int check_blocks;  // the rest of the grid copies
    int tensor_count;
    RowCopy tensors[MOST_TENSORS];
};

struct GatherRows {
    const int* rows;  // [count] row numbers of the sources
    int count;
    int tensor_count;
    RowCopy tensors[MOST_TENSORS];
};

// As in kernel_arguments.py.
static_assert(sizeof(RowCopy) == 24, "RowCopy");
static_assert(sizeof(RowScratch) == 8, "RowScratch");
static_assert(sizeof(StageEnd) == 64 + 24 * MOST_TENSORS, "StageEnd");
static_assert(sizeof(GatherRows) == 16 + 24 * MOST_TENSORS, "GatherRows");
