// Copies rows of several tensors to the front of others, in the order of a list.
//
// A piece is what one warp copies at once: 32 lanes, each with four words in flight, 2 KB of a row
// when words have 16 bytes. Warps take pieces of all tensors in turn, so small tensors do not wait
// for large ones. On an H200, 2.2 TB/s of reads with some 800 ns of latency need about 2 MB in
// flight; 1024 threads on each of 132 multiprocessors, 64 bytes each, have 8 MB.
#pragma once

#include "arguments.cuh"
#include "reduction.cuh"

constexpr int WORDS_A_LANE = 4;
constexpr unsigned WORDS_A_PIECE = 32 * WORDS_A_LANE;

// Row numbers of the source, `stride` integers apart.
struct RowList {
    const int* rows;
    int stride;
    int count;
};

// Copies this lane's words of a piece: every 32nd of the `left` words from there to the row's end.
template <class Word>
__device__ __forceinline__ void copy_piece(const Word* source, Word* target, int left) {
    Word held[WORDS_A_LANE];
#pragma unroll
    for (int step = 0; step < WORDS_A_LANE; ++step) {
        // Streaming: the source is not read again. The target is, by the next stage: it may stay.
        if (32 * step < left) held[step] = __ldcs(source + 32 * step);
    }
#pragma unroll
    for (int step = 0; step < WORDS_A_LANE; ++step) {
        if (32 * step < left) target[32 * step] = held[step];
    }
}

__device__ __forceinline__ unsigned long long offset(unsigned row, unsigned words, unsigned word) {
    return static_cast<unsigned long long>(row) * words + word;  // one wide multiply and add
}

// Copies every workers-th piece of one tensor, from `piece` on; gives the first piece beyond its
// end, counted from there, which is where this warp goes on in the next tensor.
template <class Word>
__device__ unsigned copy_tensor(const RowCopy& tensor, const RowList& list, unsigned piece,
                                unsigned workers) {
    const unsigned words = static_cast<unsigned>(tensor.row_bytes / sizeof(Word));
    const unsigned pieces_a_row = (words + WORDS_A_PIECE - 1) / WORDS_A_PIECE;
    const unsigned pieces = list.count * pieces_a_row;
#pragma unroll 1  // a piece's own four words are enough; more would spill registers
    for (; piece < pieces; piece += workers) {
        const unsigned place = piece / pieces_a_row;
        const unsigned first = piece % pieces_a_row * WORDS_A_PIECE + lane_number();
        const unsigned row = fresh(list.rows[static_cast<unsigned long long>(place) * list.stride]);
        copy_piece(static_cast<const Word*>(tensor.source) + offset(row, words, first),
                   static_cast<Word*>(tensor.target) + offset(place, words, first),
                   static_cast<int>(words - first));
    }
    return piece - pieces;
}

// By the widest words that all rows of both sides begin and end with. Without 8 bytes: 4 are nearly
// as fast, and one more copy of the loop costs registers that spill.
__device__ __forceinline__ unsigned copy_tensor(const RowCopy& tensor, const RowList& list,
                                                unsigned piece, unsigned workers) {
    const unsigned long long bits = reinterpret_cast<unsigned long long>(tensor.source) |
                                    reinterpret_cast<unsigned long long>(tensor.target) |
                                    tensor.row_bytes;
    if (bits % 16 == 0) return copy_tensor<uint4>(tensor, list, piece, workers);
    if (bits % 4 == 0) return copy_tensor<unsigned>(tensor, list, piece, workers);
    if (bits % 2 == 0) return copy_tensor<unsigned short>(tensor, list, piece, workers);
    return copy_tensor<unsigned char>(tensor, list, piece, workers);
}

// The share of `block` among `blocks`.
__device__ __forceinline__ void copy_rows(const RowCopy* tensors, int tensor_count,
                                          const RowList& list, unsigned block, unsigned blocks) {
    unsigned piece = block * warp_count() + warp_number();
    for (int index = 0; index < tensor_count; ++index) {
        piece = copy_tensor(tensors[index], list, piece, blocks * warp_count());
    }
}
