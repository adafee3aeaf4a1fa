// Products and attention of many rows on any processor, in vectors as wide as its own: sums of a block of rows with a
// panel of columns stay in registers.
//
//     b [depth, 2 vectors]  is read once for up to ROWS rows of  a [rows, depth],  whose elements are spread over lanes
//
// A product's weight lies in such panels of outputs, one behind the other. In attention, lanes are queries that read the
// same keys and values: rows of a chunk of a prompt, and heads of a group. Each sum is made in the order of `depth`, so
// that a row's result does not depend on the rows beside it.

#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels.hpp"

namespace lanes {

#if defined(__AVX512F__)
constexpr int WIDTH = 16, ROWS = 12;
#elif defined(__AVX__)
constexpr int WIDTH = 8, ROWS = 6;
#else
constexpr int WIDTH = 4, ROWS = 6;
#endif
constexpr long PANEL = 2 * WIDTH;
constexpr long AHEAD_BYTES = 2048;  // asked of memory before it is read

typedef float Vec __attribute__((vector_size(4 * WIDTH)));

static inline Vec vec(const float *at) {
    Vec out;
    memcpy(&out, at, sizeof(out));
    return out;
}
static inline Vec vec(const BFloat16 *at) {
    typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
    typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
    Halves halves;
    memcpy(&halves, at, sizeof(halves));
    return (Vec)(__builtin_convertvector(halves, Words) << 16);
}

// Where element (row, k) of `a` lies: at[row * stride + k * step].
struct Left {
    const float *at;
    long stride, step;
};

// sums [R, PANEL] += a [R, depth] · b [depth, PANEL]. ASK: b comes from memory.
template <int R, bool ASK, typename B>
static inline void add(Left a, const B *b, long depth, Vec (&sums)[R][2]) {
    for (long k = 0; k < depth; k++, a.at += a.step, b += PANEL) {
        if (ASK) {
            const char *next = reinterpret_cast<const char *>(b) + AHEAD_BYTES;
            __builtin_prefetch(next);
            if (PANEL * sizeof(B) > 64) __builtin_prefetch(next + 64);
        }
        Vec low = vec(b), high = vec(b + WIDTH);
#pragma GCC unroll 12
        for (int row = 0; row < R; row++) {
            float x = a.at[row * a.stride];
            sums[row][0] += low * x;
            sums[row][1] += high * x;
        }
    }
}

// Calls task(first, number as a constant) for blocks of `count` rows, of at most ROWS: the first has as many as can be,
// since it waits for memory, the others about equally many.
template <int R, typename Task>
static inline void block_of(int size, long first, Task &task) {
    if constexpr (R > 0) {
        if (size == R) return task(first, std::integral_constant<int, R>());
        block_of<R - 1>(size, first, task);
    }
}
template <typename Task>
static inline void each_block(long count, Task task) {
    long blocks = (count + ROWS - 1) / ROWS;
    for (long at = 0, first = 0; at < blocks; at++) {
        long size = at == 0 ? std::min(ROWS, int(count)) : (count - first + blocks - at - 1) / (blocks - at);
        block_of<ROWS>(int(size), first, task);
        first += size;
    }
}

// One panel of out [rows, outputs] = x [rows, inputs] · Wᵀ + bias.
template <typename T>
void run_panel(const float *x, const T *weight, const float *bias, T *out, long rows, long inputs, long outputs,
               long panel) {
    const T *own = weight + panel * PANEL * inputs;
    long column = panel * PANEL, count = std::min(PANEL, outputs - column);
    each_block(rows, [&](long first, auto size) {
        constexpr int R = decltype(size)::value;
        Vec sums[R][2] = {};
        Left a{x + first * inputs, inputs, 1};
        if (first == 0)
            add<R, true>(a, own, inputs, sums);
        else
            add<R, false>(a, own, inputs, sums);
        float values[R][PANEL];
        memcpy(values, sums, sizeof(values));
        for (long row = 0; row < R; row++)
            for (long at = 0; at < count; at++)
                put(out[(first + row) * outputs + column + at], values[row][at] + (bias ? bias[column + at] : 0.0f));
    });
}
extern template void run_panel(const float *, const float *, const float *, float *, long, long, long, long);
extern template void run_panel(const float *, const BFloat16 *, const float *, BFloat16 *, long, long, long, long);

template <typename T>
static void widen(const T *from, float *to, long size) {
#pragma omp simd
    for (long at = 0; at < size; at++) to[at] = wide(from[at]);
}

template <typename T>
static void product(const T *x, const T *weight, const float *bias, T *out, float *room, long rows, long inputs,
                    long outputs, long threads) {
    long panels = (outputs + PANEL - 1) / PANEL, grain = std::max(1L, panels / (8 * threads));
#pragma omp parallel num_threads(threads)
    {
        if (room) {
#pragma omp for schedule(static)
            for (long row = 0; row < rows; row++) widen(x + row * inputs, room + row * inputs, inputs);
        }
        const float *wide_x = room ? room : reinterpret_cast<const float *>(x);
#pragma omp for schedule(dynamic, grain)
        for (long panel = 0; panel < panels; panel++)
            run_panel(wide_x, weight, bias, out, rows, inputs, outputs, panel);
    }
}

}  // namespace lanes
