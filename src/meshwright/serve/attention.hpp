// Attention of a step over the paged cache: rows that decode one by one, chunks of prompts by panels of queries.

#pragma once

#include "chunks.hpp"

// What a step is, for one layer after the other. Rows are tokens.
struct Step {
    const float *cos, *sin;      // [num_tokens, dim] and [num_tokens, dim / 2], or null
    const int64_t *slots;        // [num_tokens]
    const int64_t *rows;         // [num_rows] those that are alone of their sequence
    const int64_t *contexts;     // [num_rows] tokens that each looks at
    const int64_t *firsts;       // [num_rows] where its blocks begin
    const lanes::Chunk *chunks;  // [num_chunks] tokens of one sequence
    const int64_t *wanted;       // [num_wanted] rows whose logits are wanted
    const int64_t *blocks;
    long num_tokens, num_rows, num_chunks, num_wanted;
    Shape shape;
    long threads;
};

// Into how many parts the heads of a row are cut, so that all threads have enough to do.
static long parts_of(const Step &step) {
    if (!step.num_rows || step.num_rows >= 4 * step.threads) return 1;
    long wanted = (4 * step.threads + step.num_rows - 1) / step.num_rows;
    return wanted < step.shape.kv_heads ? wanted : step.shape.kv_heads;
}

// Rows of q and out, and what they look at.
template <typename T>
struct Rows {
    const T *q;
    long q_stride;
    T *out;
    long out_stride;
    const T *keys, *values;
};

// Tasks of a step's attention, once all keys and values are in the cache: panels of chunks, then parts of rows.
struct Attention {
    const Step &step;
    long parts, num_panels = 0;

    explicit Attention(const Step &step) : step(step), parts(parts_of(step)) {
        for (long at = 0; at < step.num_chunks; at++) num_panels += panels_of(step.chunks[at]);
    }
    long group() const { return step.shape.heads / step.shape.kv_heads; }
    long panels_of(const lanes::Chunk &chunk) const {
        return step.shape.kv_heads * lanes::panels_of(chunk, group());
    }
    long num_tasks() const { return num_panels + step.num_rows * parts; }

    template <typename T>
    void run(long task, const Rows<T> &rows) const;

    template <typename T>
    void decode(long task, const Rows<T> &rows) const;
};

template <typename T>
void Attention::run(long task, const Rows<T> &rows) const {
    if (task >= num_panels) return decode(task - num_panels, rows);
    const lanes::Chunk *chunk = step.chunks;
    for (; task >= panels_of(*chunk); chunk++) task -= panels_of(*chunk);
    long panels = lanes::panels_of(*chunk, group()), head = task / panels, dim = step.shape.dim;
    long stride = step.shape.kv_heads * dim, own = head * group() * dim;
    lanes::Context<T> from{rows.keys + head * dim, rows.values + head * dim, stride, stride, dim, dim,
                           step.blocks + chunk->blocks, step.shape.block_size};
    lanes::attend_panel(rows.q + chunk->row * rows.q_stride + own, rows.out + chunk->row * rows.out_stride + own,
                        rows.q_stride, rows.out_stride, from, *chunk, group(), 1.0f / std::sqrt(float(dim)),
                        task % panels);
}

template <typename T>
void Attention::decode(long task, const Rows<T> &rows) const {
    const Shape &shape = step.shape;
    long at = task / parts, part = task % parts, row = step.rows[at];
    attend_of(rows.q + row * rows.q_stride, rows.out + row * rows.out_stride, rows.keys, rows.values,
              step.blocks + step.firsts[at], step.contexts[at], shape, part * shape.kv_heads / parts,
              (part + 1) * shape.kv_heads / parts);
}
extern template void Attention::run(long, const Rows<float> &) const;
extern template void Attention::run(long, const Rows<BFloat16> &) const;

template <typename T>
static void attend_step(const Step &step, T *q, T *k, const T *v, long q_stride, long k_stride, long v_stride, T *keys,
                        T *values, T *out) {
    const Shape &shape = step.shape;
    long own = shape.kv_heads * shape.dim;
    Attention attention(step);
    Rows<T> rows{q, q_stride, out, shape.heads * shape.dim, keys, values};
#pragma omp parallel num_threads(step.threads)
    {
#pragma omp for schedule(static)
        for (long row = 0; row < step.num_tokens; row++) {
            const float *cos = step.cos ? step.cos + row * shape.dim : nullptr;
            const float *sin = step.sin ? step.sin + row * (shape.dim / 2) : nullptr;
            enter(q + row * q_stride, k + row * k_stride, v + row * v_stride, cos, sin, keys + step.slots[row] * own,
                  values + step.slots[row] * own, shape.heads, shape.kv_heads, shape.dim);
        }
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < attention.num_tasks(); task++) attention.run(task, rows);
    }
}
