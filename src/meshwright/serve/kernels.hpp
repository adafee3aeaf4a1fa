// What a step of serving does between its matrix products: attention over the paged cache, norms, rotary positions.
//
// Tensors are contiguous in their last dimension; the distance of rows is given in elements. Values are float or
// bfloat16, sums are float. `threads` threads of OpenMP take part where there is enough to do.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

struct BFloat16 {
    uint16_t bits;
};

static inline float wide(float value) { return value; }
static inline float wide(BFloat16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}
static inline void put(float &to, float value) { to = value; }
static inline void put(BFloat16 &to, float value) {  // to the nearest, ties to even; not-a-number stays one
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// exp for arguments up to 0, to about two units in the last place; not-a-number gives not-a-number.
static inline float exp_of(float x) {
    float bounded = x < -87.0f ? -87.0f : x;
    float whole = std::nearbyint(bounded * 1.44269504f);
    float rest = (bounded - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    float value = sum * rest * rest + rest + 1.0f;
    int32_t exponent = (int32_t(whole) + 127) << 23;
    float power;
    memcpy(&power, &exponent, 4);
    return value * power;
}

constexpr int TILE = 16;  // tokens whose scores are computed before the softmax is brought up to date
constexpr long ENOUGH = 1 << 15;  // elements below which one thread is faster than several

template <typename T>
static void turn(T *head, const float *cos, const float *sin, long dim) {
    long half = dim / 2;
#pragma omp simd
    for (long at = 0; at < half; at++) {
        float low = wide(head[at]), high = wide(head[at + half]);
        put(head[at], low * cos[at] - high * sin[at]);
        put(head[at + half], high * cos[at + half] + low * sin[at]);
    }
}

// One row: queries and keys are turned to their position, keys and values go to their slot.
template <typename T>
static void enter(T *q, T *k, const T *v, const float *cos, const float *sin, T *key, T *value, long heads,
                  long kv_heads, long dim) {
    if (cos) {
        for (long head = 0; head < heads; head++) turn(q + head * dim, cos, sin, dim);
        for (long head = 0; head < kv_heads; head++) turn(k + head * dim, cos, sin, dim);
    }
    memcpy(key, k, kv_heads * dim * sizeof(T));
    memcpy(value, v, kv_heads * dim * sizeof(T));
}

typedef float Lanes __attribute__((vector_size(4 * TILE)));
typedef int32_t Places __attribute__((vector_size(4 * TILE)));

static inline Lanes load(const float *at) {
    Lanes out;
    memcpy(&out, at, sizeof(out));
    return out;
}
static inline Lanes load(const BFloat16 *at) {
    typedef uint16_t Halves __attribute__((vector_size(2 * TILE)));
    typedef uint32_t Words __attribute__((vector_size(4 * TILE)));
    Halves halves;
    memcpy(&halves, at, sizeof(halves));
    return (Lanes)(__builtin_convertvector(halves, Words) << 16);
}

// a's lanes added up in groups of STEP and b's beside them: after four such steps 16 vectors have become their 16 sums.
template <int STEP>
static inline Lanes fold(Lanes a, Lanes b) {
    Places first, second;
    for (int lane = 0; lane < TILE; lane++) {
        int from = lane & STEP ? TILE : 0;
        first[lane] = from + (lane & ~STEP);
        second[lane] = from + (lane | STEP);
    }
    return __builtin_shuffle(a, b, first) + __builtin_shuffle(a, b, second);
}

// Lane i: the sum over the lanes of rows[i].
static inline Lanes sums_of(Lanes *rows) {
    for (int row = 0; row < 8; row++) rows[row] = fold<1>(rows[2 * row], rows[2 * row + 1]);
    for (int row = 0; row < 4; row++) rows[row] = fold<2>(rows[2 * row], rows[2 * row + 1]);
    for (int row = 0; row < 2; row++) rows[row] = fold<4>(rows[2 * row], rows[2 * row + 1]);
    return fold<8>(rows[0], rows[1]);
}

// Products of one query with up to 16 keys, and the values by their weights. D: head dim, in whole vectors.
template <typename T, int D>
struct Heads {
    static inline void score(const float *query, const T *keys, long stride, int count, long, float *scores) {
        Lanes rows[TILE];
#pragma GCC unroll 16
        for (int token = 0; token < TILE; token++) {
            const T *key = keys + (token < count ? token : count - 1) * stride;
            Lanes sum = load(query) * load(key);
            for (int at = TILE; at < D; at += TILE) sum += load(query + at) * load(key + at);
            rows[token] = sum;
        }
        Lanes sums = sums_of(rows);
        memcpy(scores, &sums, sizeof(sums));
    }

    static inline void gather(const T *values, long stride, int count, long, const float *weights, float shrink,
                              float *sums) {
        Lanes own[D / TILE];
        for (int at = 0; at < D / TILE; at++) own[at] = load(sums + at * TILE) * shrink;
        for (int token = 0; token < count; token++) {
            const T *value = values + token * stride;
            for (int at = 0; at < D / TILE; at++) own[at] += load(value + at * TILE) * weights[token];
        }
        memcpy(sums, own, sizeof(own));
    }
};

template <typename T>
struct Heads<T, 0> {  // any head dim
    static inline void score(const float *query, const T *keys, long stride, int count, long dim, float *scores) {
        for (int token = 0; token < count; token++) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (long at = 0; at < dim; at++) sum += query[at] * wide(keys[token * stride + at]);
            scores[token] = sum;
        }
    }

    static inline void gather(const T *values, long stride, int count, long dim, const float *weights, float shrink,
                              float *sums) {
        for (long at = 0; at < dim; at++) sums[at] *= shrink;
        for (int token = 0; token < count; token++) {
#pragma omp simd
            for (long at = 0; at < dim; at++) sums[at] += weights[token] * wide(values[token * stride + at]);
        }
    }
};

// Softmax over the tokens seen so far, of one query head: the largest score, the sum of weights, the weighted values.
struct Running {
    float *query, *sums;
    float largest = -INFINITY, total = 0;

    // Scores to weights; what was summed before is to shrink by the result.
    float update(float *scores, int count) {
        float best = largest, sum = 0;
        for (int token = 0; token < count; token++) best = scores[token] > best ? scores[token] : best;
        float shrink = best == largest ? 1.0f : exp_of(largest - best);
#pragma omp simd reduction(+ : sum)
        for (int token = 0; token < TILE; token++) {
            float weight = exp_of(scores[token] - best);
            scores[token] = token < count ? weight : 0.0f;
            sum += scores[token];
        }
        largest = best;
        total = total * shrink + sum;
        return shrink;
    }
};

// Asks memory for `size` elements of each of some tokens, as they lie, so that the processor sees a stream.
template <typename T>
static inline void ask(const T *from, long stride, long first, long last, long size) {
    for (long token = first; token < last; token++)
        for (long at = 0; at < size; at += 64 / long(sizeof(T))) __builtin_prefetch(from + token * stride + at);
}

struct Shape {
    long heads, kv_heads, dim, block_size;
};

// Heads [first, last) of keys and values, for one row that looks at `context` tokens.
template <typename T, int D>
static void attend(const T *q, T *out, const T *keys, const T *values, const int64_t *blocks, long context,
                   const Shape &shape, long first, long last) {
    long group = shape.heads / shape.kv_heads, dim = shape.dim, num = (last - first) * group;
    float scale = 1.0f / std::sqrt(float(dim));
    float *scratch = static_cast<float *>(aligned_alloc(64, ((2 * num * dim * sizeof(float)) / 64 + 1) * 64));
    auto *heads = static_cast<Running *>(malloc(num * sizeof(Running)));
    for (long head = 0; head < num; head++) {
        heads[head] = Running{scratch + 2 * head * dim, scratch + (2 * head + 1) * dim};
        const T *own = q + (first * group + head) * dim;
        for (long at = 0; at < dim; at++) heads[head].query[at] = wide(own[at]) * scale, heads[head].sums[at] = 0;
    }
    long stride = shape.kv_heads * dim, size = (last - first) * dim, start = *blocks * shape.block_size;
    ask(keys + start * stride + first * dim, stride, 0, TILE, size);
    ask(values + start * stride + first * dim, stride, 0, TILE, size);
    for (long begin = 0; begin < context; begin += shape.block_size) {
        const int64_t *block = blocks + begin / shape.block_size;
        long slot = *block * shape.block_size;
        long filled = context - begin < shape.block_size ? context - begin : shape.block_size;
        for (long tile = 0; tile < filled; tile += TILE) {
            int count = int(filled - tile < TILE ? filled - tile : TILE);
            bool is_last = tile + TILE >= filled, has_more = begin + shape.block_size < context;
            long after = is_last && has_more ? block[1] * shape.block_size : slot + tile + TILE;
            for (long head = 0; head < num; head++) {
                long own = (first + head / group) * dim, from = (slot + tile) * stride + own;
                long ahead = is_last && !has_more ? 0 : TILE;  // tokens, of which each head asks for its share
                long begun = head * ahead / num, done = (head + 1) * ahead / num;
                ask(keys + after * stride + first * dim, stride, begun, done, size);
                ask(values + after * stride + first * dim, stride, begun, done, size);
                float scores[TILE] = {};
                Heads<T, D>::score(heads[head].query, keys + from, stride, count, dim, scores);
                float shrink = heads[head].update(scores, count);
                Heads<T, D>::gather(values + from, stride, count, dim, scores, shrink, heads[head].sums);
            }
        }
    }
    for (long head = 0; head < num; head++) {
        T *own = out + (first * group + head) * dim;
        for (long at = 0; at < dim; at++) put(own[at], heads[head].sums[at] / heads[head].total);
    }
    free(heads);
    free(scratch);
}

template <typename T>
static void attend_of(const T *q, T *out, const T *keys, const T *values, const int64_t *blocks, long context,
                      const Shape &shape, long first, long last) {
    switch (shape.dim) {
        case 32: return attend<T, 32>(q, out, keys, values, blocks, context, shape, first, last);
        case 64: return attend<T, 64>(q, out, keys, values, blocks, context, shape, first, last);
        case 96: return attend<T, 96>(q, out, keys, values, blocks, context, shape, first, last);
        case 128: return attend<T, 128>(q, out, keys, values, blocks, context, shape, first, last);
        default: return attend<T, 0>(q, out, keys, values, blocks, context, shape, first, last);
    }
}

// One row; `out` may be `x`.
template <typename T>
static void norm_row(const T *x, const T *weight, T *out, long size, float eps) {
    float square = 0;
#pragma omp simd reduction(+ : square)
    for (long at = 0; at < size; at++) square += wide(x[at]) * wide(x[at]);
    float scale = 1.0f / std::sqrt(square / float(size) + eps);
#pragma omp simd
    for (long at = 0; at < size; at++) put(out[at], wide(x[at]) * scale * wide(weight[at]));
}

template <typename T>
static void norm(const T *x, const T *weight, T *out, long num_rows, long size, float eps, long threads) {
#pragma omp parallel for num_threads(threads) if (num_rows * size > ENOUGH)
    for (long row = 0; row < num_rows; row++) norm_row(x + row * size, weight, out + row * size, size, eps);
}

// silu(gate) · up of one row.
template <typename T>
static void gated_row(const T *gate, const T *up, T *out, long size) {
#pragma omp simd
    for (long at = 0; at < size; at++) {
        float value = wide(gate[at]), power = exp_of(-std::fabs(value));
        float sigmoid = (value < 0 ? power : 1.0f) / (1.0f + power);
        put(out[at], value * sigmoid * wide(up[at]));
    }
}

template <typename T>
static void gated(const T *gate, const T *up, T *out, long num_rows, long size, long stride, long threads) {
#pragma omp parallel for num_threads(threads) if (num_rows * size > ENOUGH)
    for (long row = 0; row < num_rows; row++)
        gated_row(gate + row * stride, up + row * stride, out + row * size, size);
}

constexpr long SPAN = 512;  // logits whose largest is found before its place is looked for

// The largest of a row and its first place; not-a-number where one is in it.
static void largest_of(const float *row, long size, float &value, int64_t &place) {
    float best = -INFINITY;
    long first = 0;
    int is_bad = 0;
    for (long begin = 0; begin < size; begin += SPAN) {
        long end = begin + SPAN < size ? begin + SPAN : size;
        float own = -INFINITY;
#pragma omp simd reduction(max : own) reduction(| : is_bad)
        for (long at = begin; at < end; at++) {
            own = row[at] > own ? row[at] : own;
            is_bad |= row[at] != row[at];
        }
        if (own > best) best = own, first = begin;
    }
    while (first < size - 1 && row[first] != best) first++;
    value = is_bad ? NAN : best;
    place = first;
}

static inline void largest(const float *rows, float *values, int64_t *places, long num_rows, long size, long threads) {
#pragma omp parallel for num_threads(threads) if (num_rows * size > ENOUGH * 8)
    for (long row = 0; row < num_rows; row++) largest_of(rows + row * size, size, values[row], places[row]);
}
