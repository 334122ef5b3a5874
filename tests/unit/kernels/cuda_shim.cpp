// The fibres behind cuda_shim.h, and what the tests call.

// Checked longjmp takes a jump to another stack for an error.
#undef _FORTIFY_SOURCE

#include "cuda_shim.h"

#include <csetjmp>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include <ucontext.h>

#include "gather_rows.cu"
#include "stage_end.cu"

Dim3 threadIdx, blockIdx, blockDim, gridDim;

extern unsigned char __start_cuda_shared[], __stop_cuda_shared[];

namespace {

constexpr std::size_t STACK_BYTES = 64 * 1024;
constexpr int LANES = 32;

struct Block;

struct Fibre {
    jmp_buf context;
    ucontext_t start;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    Block* block = nullptr;
    unsigned thread = 0;
    bool begun = false;
};

struct Warp {
    int arrived = 0;
    int round = 0;  // results of two rounds are kept: a lane may be ahead by one
    std::uint32_t brought[2][LANES];
    std::vector<Fibre*> waiting;
};

struct Block {
    unsigned index = 0;
    unsigned left = 0;
    std::vector<Fibre> fibres;
    std::vector<Warp> warps;
    std::vector<Fibre*> at_barrier;
    std::vector<unsigned char> shared;
};

std::mt19937_64 chance;
std::function<void()> kernel;
std::vector<Fibre*> ready;
Fibre* current;
Block* in_shared_memory;
jmp_buf scheduler;
bool ran_to_end;

// Back to the scheduler; returns when it lets this fibre run again.
void wait() {
    if (_setjmp(current->context) == 0) _longjmp(scheduler, 1);
}

void run_thread() {
    kernel();
    ran_to_end = true;
    _longjmp(scheduler, 1);
}

std::size_t shared_bytes() { return __stop_cuda_shared - __start_cuda_shared; }

void bring_shared_memory(Block* block) {
    if (block == in_shared_memory) return;
    if (in_shared_memory) {
        std::memcpy(in_shared_memory->shared.data(), __start_cuda_shared, shared_bytes());
    }
    std::memcpy(__start_cuda_shared, block->shared.data(), shared_bytes());
    in_shared_memory = block;
}

void begin(Block& block, unsigned index) {
    block.index = index;
    block.left = blockDim.x;
    block.shared.resize(shared_bytes());
    for (auto& byte : block.shared) byte = static_cast<unsigned char>(chance());
    if (in_shared_memory == &block) in_shared_memory = nullptr;
    for (unsigned thread = 0; thread < blockDim.x; ++thread) {
        Fibre& fibre = block.fibres[thread];
        fibre.block = &block;
        fibre.thread = thread;
        fibre.begun = false;
        ready.push_back(&fibre);
    }
}

void resume(Fibre* fibre) {
    current = fibre;
    threadIdx = {fibre->thread, 0, 0};
    blockIdx = {fibre->block->index, 0, 0};
    bring_shared_memory(fibre->block);
    ran_to_end = false;
    if (_setjmp(scheduler) != 0) return;
    if (fibre->begun) _longjmp(fibre->context, 1);
    fibre->begun = true;
    getcontext(&fibre->start);
    fibre->start.uc_stack.ss_sp = fibre->stack.get();
    fibre->start.uc_stack.ss_size = STACK_BYTES;
    fibre->start.uc_link = nullptr;
    makecontext(&fibre->start, run_thread, 0);
    setcontext(&fibre->start);
}

void wake(std::vector<Fibre*>& waiting) {
    ready.insert(ready.end(), waiting.begin(), waiting.end());
    waiting.clear();
}

// Half of the seeds draw at every step. The others, eager, run the warp that was woken last as far
// as it can go, which shows other faults, and draw at times.
Fibre* next(bool eager) {
    const bool draw = !eager || chance() % 64 == 0;
    const auto place = draw ? ready.begin() + chance() % ready.size() : ready.end() - 1;
    Fibre* const fibre = *place;
    ready.erase(place);  // the others keep their order
    return fibre;
}

unsigned long long naps;  // in a row, without anyone getting on

}  // namespace

namespace shim {

void barrier() {
    Block& block = *current->block;
    block.at_barrier.push_back(current);
    if (block.at_barrier.size() == block.left) wake(block.at_barrier);
    wait();
}

void sleep() {
    ready.insert(ready.begin(), current);  // all others first, if they can
    ++naps;
    wait();
}

const std::uint32_t* exchange(std::uint32_t bits) {
    Warp& warp = current->block->warps[current->thread / LANES];
    const int round = warp.round;
    warp.brought[round][current->thread % LANES] = bits;
    warp.waiting.push_back(current);
    if (++warp.arrived == LANES) {
        warp.arrived = 0;
        warp.round = 1 - round;
        wake(warp.waiting);
    }
    wait();
    return warp.brought[round];
}

}  // namespace shim

namespace {

// 0: all done; 1: threads wait for others that will not come; 2: blocks wait for blocks that
// cannot begin.
int run_grid(unsigned grid, unsigned block, unsigned resident, std::uint64_t seed) {
    chance.seed(seed);
    const bool eager = seed % 2 != 0;
    blockDim = {block, 1, 1};
    gridDim = {grid, 1, 1};
    ready.clear();
    in_shared_memory = nullptr;
    naps = 0;
    std::vector<unsigned> order(grid);
    for (unsigned index = 0; index < grid; ++index) order[index] = index;
    std::shuffle(order.begin(), order.end(), chance);
    std::vector<Block> blocks(std::min(grid, resident));
    std::size_t begun = 0;
    for (Block& each : blocks) {
        each.fibres = std::vector<Fibre>(block);
        each.warps = std::vector<Warp>(block / LANES);
        begin(each, order[begun++]);
    }
    while (!ready.empty()) {
        Fibre* const fibre = next(eager);
        const auto before = naps;
        resume(fibre);
        if (naps == before) naps = 0;
        if (naps > 100000) return 2;
        if (!ran_to_end) continue;
        if (--fibre->block->left == 0 && begun < grid) begin(*fibre->block, order[begun++]);
    }
    for (Block& each : blocks) {
        if (each.left != 0) return 1;
    }
    return 0;
}

struct Field {
    const char* name;
    std::size_t offset;
};

#define FIELD(STRUCT, NAME) {#STRUCT "." #NAME, offsetof(STRUCT, NAME)}
#define SIZE(STRUCT) {#STRUCT, sizeof(STRUCT)}

const Field LAYOUT[] = {
    SIZE(RowCopy), FIELD(RowCopy, source), FIELD(RowCopy, target), FIELD(RowCopy, row_bytes),
    SIZE(RowScratch), FIELD(RowScratch, confidence), FIELD(RowScratch, survivor),
    SIZE(StageEnd), FIELD(StageEnd, scores), FIELD(StageEnd, confidence),
    FIELD(StageEnd, survivors),
    FIELD(StageEnd, survivor_count), FIELD(StageEnd, scratch), FIELD(StageEnd, kind),
    FIELD(StageEnd, rows), FIELD(StageEnd, classes), FIELD(StageEnd, threshold),
    FIELD(StageEnd, check_blocks), FIELD(StageEnd, tensor_count), FIELD(StageEnd, tensors),
    SIZE(GatherRows), FIELD(GatherRows, rows), FIELD(GatherRows, count),
    FIELD(GatherRows, tensor_count), FIELD(GatherRows, tensors),
    FIELD(Scratch, tickets), FIELD(Scratch, rows), {"alignof Scratch", alignof(Scratch)},
    {"LOGITS", LOGITS}, {"PROBABILITIES", PROBABILITIES},
    {"MOST_TENSORS", MOST_TENSORS}, {"WORDS_A_PIECE", WORDS_A_PIECE},
};

template <class Arguments>
std::function<void()> bound(void (*entry)(Arguments), const void* bytes) {
    Arguments arguments;
    std::memcpy(&arguments, bytes, sizeof(arguments));
    return [entry, arguments] { entry(arguments); };
}

std::function<void()> find(const char* name, const void* bytes) {
    if (!std::strcmp(name, "stage_end_float32")) return bound<StageEnd>(stage_end_float32, bytes);
    if (!std::strcmp(name, "stage_end_float16")) return bound<StageEnd>(stage_end_float16, bytes);
    if (!std::strcmp(name, "stage_end_bfloat16")) return bound<StageEnd>(stage_end_bfloat16, bytes);
    if (!std::strcmp(name, "gather_rows")) return bound<GatherRows>(gather_rows, bytes);
    return nullptr;
}

}  // namespace

// Half (or, if `brain` is set, bfloat16) numbers as the kernels widen them.
extern "C" void shim_widen(bool brain, const unsigned short* stored, float* wide,
                           std::size_t count) {
    for (std::size_t index = 0; index < count; ++index) {
        wide[index] = brain ? BFloat16::widen(stored[index]) : Float16::widen(stored[index]);
    }
}

// As run_grid; 3: no such kernel.
extern "C" int shim_launch(const char* name, const void* arguments, unsigned grid, unsigned block,
                           unsigned resident, std::uint64_t seed) {
    kernel = find(name, arguments);
    return kernel ? run_grid(grid, block, resident, seed) : 3;
}

// The name of the index-th fact about the structs, or null; its value goes to `value`.
extern "C" const char* shim_layout(std::size_t index, std::size_t* value) {
    if (index >= sizeof(LAYOUT) / sizeof(*LAYOUT)) return nullptr;
    *value = LAYOUT[index].offset;
    return LAYOUT[index].name;
}
