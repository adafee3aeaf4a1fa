// Products with a bfloat16 weight, on processors that multiply pairs of bfloat16: by matrix tiles (Intel AMX), or in
// vectors (AVX512_BF16).
//
// The weight lies in panels of 32 outputs. A panel is a row of pairs of tiles, one pair for each 32 inputs; a tile is
// 16 pairs of inputs by 16 outputs, in the order in which the processor reads it, so that memory is read once, in order:
//
//     panel   [inputs / 32]  [2 halves of the outputs]  [16 pairs of inputs]  [16 outputs]  [2 inputs]
//
// Tiles compute up to 32 rows with each reading of a panel, vectors up to 12; more rows find it in the cache again. For
// tiles, more than 32 rows are laid out in tiles first.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18; volume 2, VDPBF16PS.

#pragma once

#include "lanes.hpp"

#if defined(__AVX512BF16__)
#define HAS_PAIRS
#include <immintrin.h>
#if defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace products {
namespace {

constexpr long TILE = 16, PANEL = 2 * TILE, INPUTS = 32;
constexpr long TILE_SIZE = TILE * INPUTS;  // elements
constexpr long AHEAD = 8 * TILE_SIZE;      // elements that are asked of memory before they are read

inline void ask(const uint16_t *weight) {
    const char *at = reinterpret_cast<const char *>(weight);
#pragma GCC unroll 32
    for (int line = 0; line < 32; line++) _mm_prefetch(at + 64 * line, _MM_HINT_T0);
}

// 16 sums with their bias, to bfloat16, the first `count` of them.
inline void write(const float *sums, const float *bias, uint16_t *out, long count) {
    __m512 values = _mm512_load_ps(sums);
    if (bias) values = _mm512_add_ps(values, _mm512_loadu_ps(bias));
    __mmask16 mask = count >= TILE ? 0xffff : __mmask16((1u << count) - 1);
    _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

// A row of one panel, whose first output is `column`.
inline void write_row(const float *low, const float *high, const float *bias, uint16_t *out, long outputs,
                      long column) {
    for (const float *sums : {low, high}) {
        if (column < outputs) write(sums, bias ? bias + column : nullptr, out + column, outputs - column);
        column += TILE;
    }
}

#ifdef HAS_TILES

struct alignas(64) Config {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 to 3 sum, 4 and 5 hold rows of x, 6 and 7 the weight.
void configure(long upper, long lower) {
    Config config;
    const long rows[8] = {upper, upper, lower, lower, upper, lower, TILE, TILE};
    for (int tile = 0; tile < 8; tile++) {
        config.rows[tile] = uint8_t(rows[tile] ? rows[tile] : 1);
        config.bytes[tile] = 64;
    }
    _tile_loadconfig(&config);
}

// Where the tiles of 16 rows of x lie: the next 16 rows, the next 32 inputs (elements), and the next row (bytes).
struct Rows {
    const uint16_t *x;
    long block, step, stride;
};

// Sums of up to 32 rows and one panel, in tiles 0 to 3. FIRST: the panel comes from memory.
template <bool TWO, bool FIRST>
void sum_panel(const Rows &rows, const uint16_t *x, const uint16_t *weight, long inputs) {
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) {
        _tile_zero(2);
        _tile_zero(3);
    }
    const uint16_t *lower = x + rows.block;
    for (long at = 0; at < inputs; at += INPUTS, weight += 2 * TILE_SIZE, x += rows.step, lower += rows.step) {
        if (FIRST) ask(weight + AHEAD);
        _tile_loadd(6, weight, 64);
        _tile_loadd(7, weight + TILE_SIZE, 64);
        _tile_loadd(4, x, rows.stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (TWO) {
            _tile_loadd(5, lower, rows.stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

template <bool TWO>
void write_panel(const float *bias, uint16_t *out, long outputs, long first, long upper, long lower) {
    alignas(64) float sums[4][TILE * TILE];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if (TWO) {
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
    }
    for (long row = 0; row < upper + lower; row++) {
        const float(*own)[TILE * TILE] = row < upper ? sums : sums + 2;
        long at = (row < upper ? row : row - upper) * TILE;
        write_row(own[0] + at, own[1] + at, bias, out + row * outputs, outputs, first);
    }
}

template <bool TWO>
void run_rows(const Rows &rows, const uint16_t *x, const uint16_t *weight, long inputs, bool first) {
    if (first)
        sum_panel<TWO, true>(rows, x, weight, inputs);
    else
        sum_panel<TWO, false>(rows, x, weight, inputs);
}

// Computes panels, on one thread.
class Unit {
   public:
    static bool lays_out(long num_rows) { return num_rows > PANEL; }

    // x [num_rows, inputs], or null where `laid` has it in tiles.
    void panel(const uint16_t *x, const uint16_t *laid, const uint16_t *weight, const float *bias, uint16_t *out,
               long num_rows, long inputs, long outputs, long panel) {
        const uint16_t *own = weight + panel * PANEL * inputs;
        Rows rows{x, TILE * inputs, INPUTS, 2 * inputs};
        if (laid) rows = Rows{laid, TILE * inputs, TILE_SIZE, 64};
        for (long row = 0; row < num_rows; row += PANEL, rows.x += 2 * rows.block) {
            long left = num_rows - row, upper = left < TILE ? left : TILE;
            long lower = left - upper < TILE ? left - upper : TILE;
            if (configured != upper + lower) configure(upper, lower);
            configured = upper + lower;
            if (lower) {
                run_rows<true>(rows, rows.x, own, inputs, row == 0);
                write_panel<true>(bias, out + row * outputs, outputs, panel * PANEL, upper, lower);
            } else {
                run_rows<false>(rows, rows.x, own, inputs, row == 0);
                write_panel<false>(bias, out + row * outputs, outputs, panel * PANEL, upper, 0);
            }
        }
    }
    void release() { _tile_release(); }

   private:
    long configured = -1;
};

#else

// sums [R, PANEL] = x [R, inputs] · one panel. FIRST: the panel comes from memory.
template <int R, bool FIRST>
void sum_rows(const uint16_t *x, const uint16_t *weight, long inputs, __m512 (&sums)[R][2]) {
    for (long at = 0; at < inputs; at += INPUTS, weight += 2 * TILE_SIZE) {
        if (FIRST) ask(weight + AHEAD);
        for (long pair = 0; pair < TILE; pair++) {
            auto low = (__m512bh)_mm512_loadu_si512(weight + pair * INPUTS);
            auto high = (__m512bh)_mm512_loadu_si512(weight + TILE_SIZE + pair * INPUTS);
#pragma GCC unroll 12
            for (int row = 0; row < R; row++) {
                int32_t two;
                memcpy(&two, x + row * inputs + at + 2 * pair, sizeof(two));
                auto own = (__m512bh)_mm512_set1_epi32(two);
                sums[row][0] = _mm512_dpbf16_ps(sums[row][0], low, own);
                sums[row][1] = _mm512_dpbf16_ps(sums[row][1], high, own);
            }
        }
    }
}

// Computes panels, on one thread.
class Unit {
   public:
    static bool lays_out(long) { return false; }

    // x [num_rows, inputs]
    void panel(const uint16_t *x, const uint16_t *, const uint16_t *weight, const float *bias, uint16_t *out,
               long num_rows, long inputs, long outputs, long panel) {
        const uint16_t *own = weight + panel * PANEL * inputs;
        long column = panel * PANEL;
        lanes::each_block(num_rows, [&](long first, auto size) {
            constexpr int R = decltype(size)::value;
            __m512 sums[R][2] = {};
            if (first == 0)
                sum_rows<R, true>(x, own, inputs, sums);
            else
                sum_rows<R, false>(x + first * inputs, own, inputs, sums);
            alignas(64) float values[R][PANEL];
            memcpy(values, sums, sizeof(values));
            for (long row = 0; row < R; row++)
                write_row(values[row], values[row] + TILE, bias, out + (first + row) * outputs, outputs, column);
        });
    }
    void release() {}
};

#endif

// One row of x to its place in the tiles.
void lay_out(const uint16_t *x, uint16_t *tiles, long row, long inputs) {
    uint16_t *to = tiles + (row / TILE) * TILE * inputs + (row % TILE) * INPUTS;
    for (long at = 0; at < inputs; at += INPUTS) memcpy(to + at * TILE, x + row * inputs + at, 2 * INPUTS);
}

}  // namespace
}  // namespace products

#endif
