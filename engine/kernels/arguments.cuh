// What the host hands to the kernels, by value, and the scratch block that they keep between
// their blocks. Mirrored by arguments.py; a test compares both field by field.
#pragma once

constexpr int MOST_TENSORS = 16;

// What the scores are and what of them is checked (PAME 5.3). As CheckKind in arguments.py.
enum Kind : int {
    LOGITS = 0,               // confidence: largest softmax probability
    PROBABILITIES = 1,        // confidence: largest probability
    HEAT_MAPS = 2,            // count over the k highest values of every map
    PIXEL_LOGITS = 3,         // count over every pixel's largest softmax probability
    PIXEL_PROBABILITIES = 4,  // count over every pixel's largest probability
};

// A tensor whose rows are copied. Source and target must not overlap.
struct RowCopy {
    const void* source;
    void* target;
    unsigned long long row_bytes;  // may be 0
};

// One row's results, until the host has them.
struct RowScratch {
    int principal;     // prediction, or principal values that count; 0 between launches
    float confidence;  // classification only
    int survivor;      // not of this row: the survivor that this place in their list holds
};

// One a stream: launches that overlap must not share it. All zero before the first launch; every
// launch leaves it so that the next one can start, hence no memset between them and nothing in the
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
    const void* scores;            // [rows, channels, positions], dense
    const unsigned char* runs_on;  // [rows], not 0: the row goes on although it exits; or null
    float* confidence;             // [rows]; written for LOGITS and PROBABILITIES only
    int* principal;                // [rows] prediction, or principal values at the threshold
    unsigned char* exits;          // [rows] 1: the check is passed
    int* survivors;                // [rows] row numbers that go on, rising; the first so many
    int* survivor_count;           // [1]
    Scratch* scratch;
    int kind;
    int rows;
    int channels;          // classes or maps
    int positions;         // pixels; 1 for LOGITS and PROBABILITIES
    int units_a_row;       // parts into which a row's check is split, one block each at a time
    int positions_a_unit;  // of pixel checks
    int highest;           // k of HEAT_MAPS
    int count_threshold;   // principal values that make a row exit
    float threshold;       // confidence threshold
    int check_blocks;      // the rest of the grid copies
    int tensor_count;
    int unused;
    RowCopy tensors[MOST_TENSORS];
};

struct GatherRows {
    const int* rows;  // [count] row numbers of the sources
    int count;
    int tensor_count;
    RowCopy tensors[MOST_TENSORS];
};

static_assert(sizeof(RowCopy) == 24, "RowCopy differs from arguments.py");
static_assert(sizeof(RowScratch) == 12, "RowScratch differs from arguments.py");
static_assert(sizeof(StageEnd) == 112 + 24 * MOST_TENSORS, "StageEnd differs from arguments.py");
static_assert(sizeof(GatherRows) == 16 + 24 * MOST_TENSORS, "GatherRows differs from arguments.py");
