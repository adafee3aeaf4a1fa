// Attention of chunks of prompts over the paged cache: queries are lanes, and each reading of keys and values serves a
// panel of them.
//
//     scores [tokens, lanes] = K [tokens, dim] · Qᵀ [dim, lanes]      sums [v_dim, lanes] += Vᵀ · weights [tokens, lanes]
//
// The softmax is brought up to date for 48 tokens at a time, at the same places of a context however it was cut into
// chunks. Lanes are rows of a chunk and the query heads of one key/value head.

#pragma once

#include "lanes.hpp"

namespace lanes {

constexpr long TOKENS = 48;

// Several tokens of one sequence.
struct Chunk {
    int64_t row, count;  // its rows of the step
    int64_t context;     // tokens that its last row looks at
    int64_t blocks;      // where its blocks begin
};

// What some queries look at: one head of keys and values, and the rows' widths.
template <typename T>
struct Context {
    const T *keys, *values;  // of slot 0
    long key_stride, value_stride, dim, value_dim;
    const int64_t *blocks;
    long block_size;
};

// Room for one panel of queries, each row of it a panel wide, and for keys and values of the tokens at hand.
struct Room {
    float *queries, *sums, *scores, *keys, *values;
    explicit Room(long dim, long value_dim) {
        long size = PANEL * (dim + value_dim + TOKENS) + TOKENS * (dim + value_dim);
        queries = static_cast<float *>(aligned_alloc(64, (size * sizeof(float) / 64 + 1) * 64));
        sums = queries + PANEL * dim;
        scores = sums + PANEL * value_dim;
        keys = scores + PANEL * TOKENS;
        values = keys + TOKENS * dim;
    }
    ~Room() { free(queries); }
};

// Keys and values of tokens [begin, begin + count), as floats.
template <typename T>
static void fetch(const Context<T> &from, long begin, long count, const Room &room) {
    for (long token = 0; token < count; token++) {
        long at = begin + token, slot = from.blocks[at / from.block_size] * from.block_size + at % from.block_size;
        widen(from.keys + slot * from.key_stride, room.keys + token * from.dim, from.dim);
        widen(from.values + slot * from.value_stride, room.values + token * from.value_dim, from.value_dim);
    }
}

// Of each lane: how many tokens it looks at, its largest score and its sum of weights.
struct Softmax {
    int32_t contexts[PANEL];
    float largest[PANEL], total[PANEL], shrink[PANEL];

    // Scores [count, PANEL] of tokens from `begin` on become weights; what was summed before is to shrink by `shrink`.
    void update(float *scores, long begin, long count) {
        float best[PANEL];
        memcpy(best, largest, sizeof(best));
        for (long token = 0; token < count; token++) {
            float *own = scores + token * PANEL;
            int32_t place = int32_t(begin + token);
#pragma omp simd
            for (long lane = 0; lane < PANEL; lane++) {
                own[lane] = place < contexts[lane] ? own[lane] : -INFINITY;
                best[lane] = own[lane] > best[lane] ? own[lane] : best[lane];
            }
        }
#pragma omp simd
        for (long lane = 0; lane < PANEL; lane++) {
            shrink[lane] = best[lane] == largest[lane] ? 1.0f : exp_of(largest[lane] - best[lane]);
            largest[lane] = best[lane];
            total[lane] *= shrink[lane];
        }
        for (long token = 0; token < count; token++) {
            float *own = scores + token * PANEL;
            int32_t place = int32_t(begin + token);
#pragma omp simd
            for (long lane = 0; lane < PANEL; lane++) {
                float weight = exp_of(own[lane] - best[lane]);
                own[lane] = place < contexts[lane] ? weight : 0.0f;
                total[lane] += own[lane];
            }
        }
    }
};

// A panel of queries over its context. `softmax.contexts` and room.queries are set; room.sums get the weighted values.
template <typename T>
static void look(const Context<T> &from, Softmax &softmax, const Room &room) {
    long longest = *std::max_element(softmax.contexts, softmax.contexts + PANEL);
    std::fill(softmax.largest, softmax.largest + PANEL, -INFINITY);
    std::fill(softmax.total, softmax.total + PANEL, 0.0f);
    std::fill(room.sums, room.sums + PANEL * from.value_dim, 0.0f);
    for (long begin = 0; begin < longest; begin += TOKENS) {
        long count = std::min(TOKENS, longest - begin);
        fetch(from, begin, count, room);
        each_block(count, [&](long first, auto size) {
            Vec sums[decltype(size)::value][2] = {};
            add<decltype(size)::value, false>(Left{room.keys + first * from.dim, from.dim, 1}, room.queries, from.dim, sums);
            memcpy(room.scores + first * PANEL, sums, sizeof(sums));
        });
        softmax.update(room.scores, begin, count);
        Vec low = vec(softmax.shrink), high = vec(softmax.shrink + WIDTH);
        each_block(from.value_dim, [&](long first, auto size) {
            constexpr int R = decltype(size)::value;
            Vec sums[R][2];
            float *own = room.sums + first * PANEL;
            memcpy(sums, own, sizeof(sums));
            for (int row = 0; row < R; row++) sums[row][0] *= low, sums[row][1] *= high;
            add<R, false>(Left{room.values + first, 1, from.value_dim}, room.scores, count, sums);
            memcpy(own, sums, sizeof(sums));
        });
    }
}

// Panels of queries of a chunk, for each key/value head.
static inline long panels_of(const Chunk &chunk, long group) { return (chunk.count * group + PANEL - 1) / PANEL; }

// One panel of queries of one key/value head. q and out: of the chunk's first row and the group's first head; their
// strides are those of rows.
template <typename T>
static void attend_panel(const T *q, T *out, long q_stride, long out_stride, const Context<T> &from, const Chunk &chunk,
                         long group, float scale, long panel) {
    Room room(from.dim, from.value_dim);
    Softmax softmax;
    long first = panel * PANEL, last = std::min(first + PANEL, chunk.count * group);
    for (long lane = 0; lane < PANEL; lane++) {
        long at = std::min(first + lane, last - 1), row = at / group;
        const T *own = q + row * q_stride + (at % group) * from.dim;
        softmax.contexts[lane] = int32_t(chunk.context - chunk.count + row + 1);
        for (long d = 0; d < from.dim; d++) room.queries[d * PANEL + lane] = wide(own[d]) * scale;
    }
    look(from, softmax, room);
    for (long at = first; at < last; at++) {
        T *own = out + (at / group) * out_stride + (at % group) * from.value_dim;
        float by = 1.0f / softmax.total[at - first];
        for (long d = 0; d < from.value_dim; d++) put(own[d], room.sums[d * PANEL + at - first] * by);
    }
}

}  // namespace lanes
