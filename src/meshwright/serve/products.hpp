// Products of a few rows with a bfloat16 weight, on processors with matrix tiles (Intel AMX).
//
// The weight lies in panels of 32 outputs. A panel is a row of pairs of tiles, one pair for each 32 inputs; a tile is
// 16 pairs of inputs by 16 outputs, in the order in which the processor reads it, so that memory is read once, in order:
//
//     panel   [inputs / 32]  [2 halves of the outputs]  [16 pairs of inputs]  [16 outputs]  [2 inputs]
//
// Up to 32 rows are computed with each reading of a panel; more rows find it in the cache again, and are laid out in
// tiles first.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace products {
namespace {

constexpr long TILE = 16, PANEL = 2 * TILE, INPUTS = 32;
constexpr long TILE_SIZE = TILE * INPUTS;  // elements
constexpr long AHEAD = 8 * TILE_SIZE;      // elements that are asked of memory before they are read

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

inline void ask(const uint16_t *weight) {
    const char *at = reinterpret_cast<const char *>(weight);
#pragma GCC unroll 32
    for (int line = 0; line < 32; line++) _mm_prefetch(at + 64 * line, _MM_HINT_T0);
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

// 16 sums with their bias, to bfloat16, the first `count` of them.
inline void write(const float *sums, const float *bias, uint16_t *out, long count) {
    __m512 values = _mm512_load_ps(sums);
    if (bias) values = _mm512_add_ps(values, _mm512_loadu_ps(bias));
    __mmask16 mask = count >= TILE ? 0xffff : __mmask16((1u << count) - 1);
    _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(values));
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
        for (long half = 0; half < 2; half++) {
            long column = first + half * TILE, count = outputs - column;
            if (count > 0) write(own[half] + at, bias ? bias + column : nullptr, out + row * outputs + column, count);
        }
    }
}

template <bool TWO>
void run_rows(const Rows &rows, const uint16_t *x, const uint16_t *weight, long inputs, bool first) {
    if (first)
        sum_panel<TWO, true>(rows, x, weight, inputs);
    else
        sum_panel<TWO, false>(rows, x, weight, inputs);
}

void run_panel(const Rows &rows, const uint16_t *weight, const float *bias, uint16_t *out, long num_rows, long inputs,
               long outputs, long panel, long &configured) {
    const uint16_t *own = weight + panel * PANEL * inputs, *x = rows.x;
    for (long row = 0; row < num_rows; row += PANEL, x += 2 * rows.block) {
        long left = num_rows - row, upper = left < TILE ? left : TILE;
        long lower = left - upper < TILE ? left - upper : TILE;
        if (configured != upper + lower) {
            configure(upper, lower);
            configured = upper + lower;
        }
        if (lower) {
            run_rows<true>(rows, x, own, inputs, row == 0);
            write_panel<true>(bias, out + row * outputs, outputs, panel * PANEL, upper, lower);
        } else {
            run_rows<false>(rows, x, own, inputs, row == 0);
            write_panel<false>(bias, out + row * outputs, outputs, panel * PANEL, upper, 0);
        }
    }
}

// One row of x to its place in the tiles.
void lay_out(const uint16_t *x, uint16_t *tiles, long row, long inputs) {
    uint16_t *to = tiles + (row / TILE) * TILE * inputs + (row % TILE) * INPUTS;
    for (long at = 0; at < inputs; at += INPUTS) memcpy(to + at * TILE, x + row * inputs + at, 2 * INPUTS);
}

}  // namespace
}  // namespace products

#endif
