// A whole step of a model in bfloat16 whose rows all decode: every layer, the last norm and the head, in one region of
// threads, from products by tiles and the kernels of `kernels.hpp`. It gives what they give one by one.
//
//     x ─ norm ─▶ qkv ─▶ turn, cache, attend ─▶ o ─▶ + ─ norm ─▶ gate, up ─▶ silu·up ─▶ down ─▶ +  ...  norm ─▶ head
//
// Each arrow is a phase of many tasks. Threads claim tasks, and go on to the next phase when all tasks of this one are
// done, whoever did them: a thread that another process keeps from its core holds up no task but the one it has begun.

#include "kernels.hpp"
#include "products.hpp"

#ifdef HAS_TILES

#include <algorithm>
#include <atomic>
#include <new>
#include <sched.h>

namespace {

constexpr long SPINS = 1 << 12;  // looks at an unfinished phase before the core is offered to others
constexpr long SHARES = 8;       // claims that each thread makes in a phase of many tasks, about

struct Product {
    const uint16_t *weight;  // in tiles
    const float *bias;       // whole panels of it, or null
    long inputs, outputs;
};

struct Layer {
    const BFloat16 *attention_norm, *q_norm, *k_norm, *mlp_norm;  // of queries and keys: or null
    BFloat16 *keys, *values;
    Product qkv, o, gate_up, down;
};

struct Stack {
    const Layer *layers;
    long num_layers, hidden, ffn;
    float eps, head_eps;  // of layers' norms, and of those of queries and keys
    const BFloat16 *embedding, *final_norm;
    Product head;
};

struct alignas(128) Phase {
    std::atomic<long> claimed{0};
    alignas(64) std::atomic<long> done{0};
};

// What a step writes and reads again; `tiles` where there are more rows than one reading of a weight takes.
struct Scratch {
    BFloat16 *x, *normed, *qkv, *heads, *sum, *both, *inner, *logits;
    uint16_t *tiles;
};

class Run {
   public:
    Run(const Stack &stack, const Step &step, const Scratch &scratch, Phase *phases)
        : stack(stack), step(step), own(scratch), next(phases) {}

    void all(const int64_t *tokens, float *logits) {
        for (long at = 0; at < stack.num_layers; at++) layer(stack.layers[at], at == 0 ? tokens : nullptr);
        each_row([&](long row) { enter_norm(row, nullptr, stack.final_norm); });
        product(stack.head, own.normed, own.logits);
        _tile_release();
        long size = stack.head.outputs;
        each_row([&](long row) {
#pragma omp simd
            for (long at = row * size; at < (row + 1) * size; at++) logits[at] = wide(own.logits[at]);
        });
    }

   private:
    const Stack &stack;
    const Step &step;
    const Scratch own;
    Phase *next;
    long configured = -1;

    template <typename Task>
    void phase(long count, long grain, Task task) {
        Phase &now = *next++;
        long mine = 0;
        for (long first; (first = now.claimed.fetch_add(grain, std::memory_order_relaxed)) < count;) {
            long last = std::min(first + grain, count);
            for (long at = first; at < last; at++) task(at);
            mine += last - first;
        }
        if (mine) now.done.fetch_add(mine, std::memory_order_acq_rel);
        for (long spins = 0; now.done.load(std::memory_order_acquire) < count; spins++) {
            if (spins < SPINS)
                _mm_pause();
            else
                sched_yield();
        }
    }

    template <typename Task>
    void each_row(Task task) {
        phase(step.num_tokens, std::max(1L, step.num_tokens / (SHARES * step.threads)), task);
    }

    void layer(const Layer &layer, const int64_t *tokens) {
        const Shape &shape = step.shape;
        long q_size = shape.heads * shape.dim, parts = parts_of(step);
        each_row([&](long row) { enter_norm(row, tokens, layer.attention_norm); });
        product(layer.qkv, own.normed, own.qkv);
        phase(step.num_tokens * parts, 1, [&](long task) { attend_part(layer, task / parts, task % parts, parts); });
        if (own.tiles) each_row([&](long row) { to_tiles(own.heads, row, q_size); });
        product(layer.o, own.heads, own.sum);
        each_row([&](long row) { enter_norm(row, nullptr, layer.mlp_norm); });
        product(layer.gate_up, own.normed, own.both);
        each_row([&](long row) {
            const BFloat16 *both = own.both + 2 * row * stack.ffn;
            gated_row(both, both + stack.ffn, own.inner + row * stack.ffn, stack.ffn);
            to_tiles(own.inner, row, stack.ffn);
        });
        product(layer.down, own.inner, own.sum);
    }

    // x = the token's embedding, or x += sum; normed = norm(x).
    void enter_norm(long row, const int64_t *tokens, const BFloat16 *weight) {
        long size = stack.hidden;
        BFloat16 *x = own.x + row * size;
        const BFloat16 *sum = own.sum + row * size;
        if (tokens) {
            memcpy(x, stack.embedding + tokens[row] * size, size * sizeof(*x));
        } else {
#pragma omp simd
            for (long at = 0; at < size; at++) put(x[at], wide(x[at]) + wide(sum[at]));
        }
        norm_row(x, weight, own.normed + row * size, size, stack.eps);
        to_tiles(own.normed, row, size);
    }

    void to_tiles(const BFloat16 *rows, long row, long size) {
        if (own.tiles) products::lay_out(reinterpret_cast<const uint16_t *>(rows), own.tiles, row, size);
    }

    // Some key/value heads of one row, and their queries.
    void attend_part(const Layer &layer, long at, long part, long parts) {
        const Shape &shape = step.shape;
        long first = part * shape.kv_heads / parts, last = (part + 1) * shape.kv_heads / parts, dim = shape.dim;
        long row = step.rows[at], group = shape.heads / shape.kv_heads, kv_size = shape.kv_heads * dim;
        BFloat16 *q = own.qkv + row * (shape.heads * dim + 2 * kv_size), *k = q + shape.heads * dim;
        const BFloat16 *v = k + kv_size;
        norm_heads(q, layer.q_norm, first * group, last * group);
        norm_heads(k, layer.k_norm, first, last);
        const float *cos = step.cos ? step.cos + row * dim : nullptr, *sin = cos ? step.sin + row * (dim / 2) : nullptr;
        long slot = step.slots[row] * kv_size + first * dim;
        enter(q + first * group * dim, k + first * dim, v + first * dim, cos, sin, layer.keys + slot,
              layer.values + slot, (last - first) * group, last - first, dim);
        attend_of(q, own.heads + row * shape.heads * dim, layer.keys, layer.values, step.blocks + step.firsts[at],
                  step.contexts[at], shape, first, last);
    }

    void norm_heads(BFloat16 *heads, const BFloat16 *weight, long first, long last) {
        long dim = step.shape.dim;
        if (!weight) return;
        for (long head = first; head < last; head++)
            norm_row(heads + head * dim, weight, heads + head * dim, dim, stack.head_eps);
    }

    void product(const Product &of, const BFloat16 *x, BFloat16 *out) {
        using namespace products;
        long panels = (of.outputs + PANEL - 1) / PANEL;
        const uint16_t *rows = reinterpret_cast<const uint16_t *>(x);
        Rows where{rows, products::TILE * of.inputs, INPUTS, 2 * of.inputs};
        if (own.tiles) where = Rows{own.tiles, products::TILE * of.inputs, TILE_SIZE, 64};
        phase(panels, std::max(1L, panels / (SHARES * step.threads)), [&](long panel) {
            run_panel(where, of.weight, of.bias, reinterpret_cast<uint16_t *>(out), step.num_tokens, of.inputs,
                      of.outputs, panel, configured);
        });
    }
};

constexpr long LINE = 64;

long aligned(long bytes) { return (bytes + LINE - 1) / LINE * LINE; }

// Cuts `room` into what a step needs; its length in bytes.
long cut(const Stack &stack, const Step &step, char *room, Scratch &out, Phase *&phases) {
    long rows = step.num_tokens, dim = step.shape.dim, q_size = step.shape.heads * dim, at = 0;
    long widest = std::max({stack.hidden, q_size, stack.ffn}), padded = (rows + products::TILE - 1) / products::TILE;
    auto take = [&](long bytes) {
        char *from = room + at;
        at += aligned(bytes);
        return from;
    };
    auto values = [&](long size) { return reinterpret_cast<BFloat16 *>(take(2 * rows * size)); };
    phases = reinterpret_cast<Phase *>(take(aligned((9 * stack.num_layers + 3) * long(sizeof(Phase)) + 128)));
    out.x = values(stack.hidden);
    out.normed = values(stack.hidden);
    out.qkv = values(q_size + 2 * step.shape.kv_heads * dim);
    out.heads = values(q_size);
    out.sum = values(stack.hidden);
    out.both = values(2 * stack.ffn);
    out.inner = values(stack.ffn);
    out.logits = values(stack.head.outputs);
    out.tiles = rows > products::PANEL
                    ? reinterpret_cast<uint16_t *>(take(2 * padded * products::TILE * widest))
                    : nullptr;
    return at;
}

}  // namespace

extern "C" {
// Bytes of the room that `stack_run` needs.
long stack_room(const Stack *stack, const Step *step) {
    Scratch scratch;
    Phase *phases;
    return cut(*stack, *step, nullptr, scratch, phases) + 128;
}

// tokens [rows] through all layers to logits [rows, outputs of the head].
void stack_run(const Stack *stack, const Step *step, const int64_t *tokens, float *logits, char *room) {
    Scratch scratch;
    Phase *phases;
    room += (128 - reinterpret_cast<uintptr_t>(room) % 128) % 128;
    cut(*stack, *step, room, scratch, phases);
    for (long at = 0; at < 9 * stack->num_layers + 3; at++) new (phases + at) Phase;
#pragma omp parallel num_threads(step->threads)
    Run(*stack, *step, scratch, phases).all(tokens, logits);
}
}

#else

struct Stack;
extern "C" {
long stack_room(const Stack *, const Step *) { return 0; }
void stack_run(const Stack *, const Step *, const int64_t *, float *, char *) {}
}

#endif
