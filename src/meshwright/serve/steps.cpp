// A whole step of a model: every layer, the last norm and the head, in one region of threads, from the products of
// `products.hpp` or `lanes.hpp` and the kernels of `attention.hpp`. It gives what they give one by one.
//
//     x ─ norm ─▶ qkv ─▶ turn, cache, attend ─▶ o ─▶ + ─ norm ─▶ gate, up ─▶ silu·up ─▶ down ─▶ +  ...  norm ─▶ head
//
// Each arrow is a phase of many tasks. Threads claim tasks, and go on to the next phase when all tasks of this one are
// done, whoever did them: a thread that another process keeps from its core holds up no task but the one it has begun.

#include <algorithm>
#include <atomic>
#include <new>
#include <sched.h>

#include "attention.hpp"
#include "products.hpp"

namespace {

constexpr long SPINS = 1 << 12;  // looks at an unfinished phase before the core is offered to others
constexpr long SHARES = 8;       // claims that each thread makes in a phase of many tasks, about
constexpr long PHASES = 10;      // of a layer, at most
constexpr long LINE = 64;

struct Product {
    const void *weight;  // in panels
    const float *bias;   // whole panels of it, or null
    long inputs, outputs;
};

template <typename T>
struct Layer {
    const T *attention_norm, *q_norm, *k_norm, *mlp_norm;  // of queries and keys: or null
    T *keys, *values;
    Product qkv, o, gate_up, down;
};

enum Kind : long { TILES, LANES_BFLOAT16, LANES_FLOAT32 };

template <typename T>
struct Stack {
    long kind;
    const Layer<T> *layers;
    long num_layers, hidden, ffn;
    float eps, head_eps;  // of layers' norms, and of those of queries and keys
    const T *embedding, *final_norm;
    Product head;
};

struct alignas(128) Phase {
    std::atomic<long> claimed{0};
    alignas(64) std::atomic<long> done{0};
};

static inline void rest() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// How a product reads rows of x: as they are, or as `lay_out` has put them into `laid`.
template <typename T>
struct LaneProducts {
    using Value = T;
    static constexpr long PANEL = lanes::PANEL;
    static bool lays_out(long) { return sizeof(T) < sizeof(float); }
    static long laid_bytes(long rows, long widest) { return lays_out(rows) ? long(sizeof(float)) * rows * widest : 0; }
    static void lay_out(const T *x, char *laid, long row, long size) {
        lanes::widen(x + row * size, reinterpret_cast<float *>(laid) + row * size, size);
    }
    void panel(const Product &of, const T *x, const char *laid, T *out, long rows, long at) {
        const float *wide_x = laid ? reinterpret_cast<const float *>(laid) : reinterpret_cast<const float *>(x);
        lanes::run_panel(wide_x, static_cast<const T *>(of.weight), of.bias, out, rows, of.inputs, of.outputs, at);
    }
    void release() {}
};

#ifdef HAS_PAIRS
class TileProducts {
   public:
    using Value = BFloat16;
    static constexpr long PANEL = products::PANEL;
    static bool lays_out(long rows) { return products::Unit::lays_out(rows); }
    static long laid_bytes(long rows, long widest) {
        long padded = (rows + products::TILE - 1) / products::TILE * products::TILE;
        return lays_out(rows) ? 2 * padded * widest : 0;
    }
    static void lay_out(const BFloat16 *x, char *laid, long row, long size) {
        products::lay_out(reinterpret_cast<const uint16_t *>(x), reinterpret_cast<uint16_t *>(laid), row, size);
    }
    void panel(const Product &of, const BFloat16 *x, const char *laid, BFloat16 *out, long rows, long at) {
        unit.panel(reinterpret_cast<const uint16_t *>(x), reinterpret_cast<const uint16_t *>(laid),
                   static_cast<const uint16_t *>(of.weight), of.bias, reinterpret_cast<uint16_t *>(out), rows,
                   of.inputs, of.outputs, at);
    }
    void release() { unit.release(); }

   private:
    products::Unit unit;
};
#endif

// What a step writes and reads again. `laid`: room for rows as products read them, or null.
template <typename T>
struct Scratch {
    T *x, *normed, *qkv, *heads, *sum, *both, *inner, *logits;
    char *laid;
    Phase *phases;
    long num_phases;
};

template <typename Products>
class Run {
   public:
    using T = typename Products::Value;

    Run(const Stack<T> &stack, const Step &step, const Scratch<T> &scratch)
        : stack(stack), step(step), own(scratch), next(scratch.phases), attention(step) {}

    // logits: [num_wanted, outputs of the head]
    void all(const int64_t *tokens, float *logits) {
        for (long at = 0; at < stack.num_layers; at++) layer(stack.layers[at], at == 0 ? tokens : nullptr);
        long count = step.num_wanted, size = stack.head.outputs;
        each(count, [&](long at) { enter_norm(step.wanted[at], nullptr, stack.final_norm, at, count); });
        if constexpr (std::is_same_v<T, float>) {
            product(stack.head, own.normed, logits, count);
        } else {
            product(stack.head, own.normed, own.logits, count);
            each(count, [&](long at) { lanes::widen(own.logits + at * size, logits + at * size, size); });
        }
        products.release();
    }

   private:
    const Stack<T> &stack;
    const Step &step;
    const Scratch<T> own;
    Phase *next;
    const Attention attention;
    Products products;

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
                rest();
            else
                sched_yield();
        }
    }

    template <typename Task>
    void each(long rows, Task task) {
        phase(rows, std::max(1L, rows / (SHARES * step.threads)), task);
    }

    void layer(const Layer<T> &layer, const int64_t *tokens) {
        const Shape &shape = step.shape;
        long rows = step.num_tokens, q_size = shape.heads * shape.dim;
        each(rows, [&](long row) { enter_norm(row, tokens, layer.attention_norm, row, rows); });
        product(layer.qkv, own.normed, own.qkv, rows);
        attend(layer);
        if (Products::lays_out(rows)) each(rows, [&](long row) { lay_out(own.heads, row, q_size, rows); });
        product(layer.o, own.heads, own.sum, rows);
        each(rows, [&](long row) { enter_norm(row, nullptr, layer.mlp_norm, row, rows); });
        product(layer.gate_up, own.normed, own.both, rows);
        each(rows, [&](long row) {
            const T *both = own.both + 2 * row * stack.ffn;
            gated_row(both, both + stack.ffn, own.inner + row * stack.ffn, stack.ffn);
            lay_out(own.inner, row, stack.ffn, rows);
        });
        product(layer.down, own.inner, own.sum, rows);
    }

    // x = the token's embedding, or x += sum; normed = norm(x), as row `to` of `rows`.
    void enter_norm(long row, const int64_t *tokens, const T *weight, long to, long rows) {
        long size = stack.hidden;
        T *x = own.x + row * size;
        const T *sum = own.sum + row * size;
        if (tokens) {
            memcpy(x, stack.embedding + tokens[row] * size, size * sizeof(*x));
        } else {
#pragma omp simd
            for (long at = 0; at < size; at++) put(x[at], wide(x[at]) + wide(sum[at]));
        }
        norm_row(x, weight, own.normed + to * size, size, stack.eps);
        lay_out(own.normed, to, size, rows);
    }

    void lay_out(const T *x, long row, long size, long rows) {
        if (Products::lays_out(rows)) Products::lay_out(x, own.laid, row, size);
    }

    // Where all rows decode, a task enters its own heads; rows of chunks look at each other's.
    void attend(const Layer<T> &layer) {
        const Shape &shape = step.shape;
        long q_size = shape.heads * shape.dim, stride = q_size + 2 * shape.kv_heads * shape.dim, parts = attention.parts;
        ::Rows<T> rows{own.qkv, stride, own.heads, q_size, layer.keys, layer.values};
        if (step.num_chunks) {
            each(step.num_tokens, [&](long row) { enter_heads(layer, row, 0, shape.kv_heads); });
            phase(attention.num_tasks(), 1, [&](long task) { attention.run(task, rows); });
            return;
        }
        phase(attention.num_tasks(), 1, [&](long task) {
            long part = task % parts, heads = shape.kv_heads;
            enter_heads(layer, step.rows[task / parts], part * heads / parts, (part + 1) * heads / parts);
            attention.run(task, rows);
        });
    }

    // Key/value heads [first, last) of one row, and their queries.
    void enter_heads(const Layer<T> &layer, long row, long first, long last) {
        const Shape &shape = step.shape;
        long dim = shape.dim, group = shape.heads / shape.kv_heads, kv_size = shape.kv_heads * dim;
        T *q = own.qkv + row * (shape.heads * dim + 2 * kv_size), *k = q + shape.heads * dim;
        const T *v = k + kv_size;
        norm_heads(q, layer.q_norm, first * group, last * group);
        norm_heads(k, layer.k_norm, first, last);
        const float *cos = step.cos ? step.cos + row * dim : nullptr, *sin = cos ? step.sin + row * (dim / 2) : nullptr;
        long slot = step.slots[row] * kv_size + first * dim;
        enter(q + first * group * dim, k + first * dim, v + first * dim, cos, sin, layer.keys + slot,
              layer.values + slot, (last - first) * group, last - first, dim);
    }

    void norm_heads(T *heads, const T *weight, long first, long last) {
        long dim = step.shape.dim;
        if (!weight) return;
        for (long head = first; head < last; head++)
            norm_row(heads + head * dim, weight, heads + head * dim, dim, stack.head_eps);
    }

    void product(const Product &of, const T *x, T *out, long rows) {
        long panels = rows ? (of.outputs + Products::PANEL - 1) / Products::PANEL : 0;
        const char *laid = Products::lays_out(rows) ? own.laid : nullptr;
        phase(panels, std::max(1L, panels / (SHARES * step.threads)),
              [&](long panel) { products.panel(of, x, laid, out, rows, panel); });
    }
};

long aligned(long bytes) { return (bytes + LINE - 1) / LINE * LINE; }

// Cuts `room` into what a step needs; its length in bytes.
template <typename Products, typename T>
long cut(const Stack<T> &stack, const Step &step, char *room, Scratch<T> &out) {
    long rows = step.num_tokens, dim = step.shape.dim, q_size = step.shape.heads * dim, at = 0;
    auto take = [&](long bytes) {
        char *from = room + at;
        at += aligned(bytes);
        return from;
    };
    auto values = [&](long count, long size) { return reinterpret_cast<T *>(take(sizeof(T) * count * size)); };
    out.num_phases = PHASES * stack.num_layers + 3;
    out.phases = reinterpret_cast<Phase *>(take(out.num_phases * long(sizeof(Phase))));
    out.x = values(rows, stack.hidden);
    out.normed = values(rows, stack.hidden);
    out.qkv = values(rows, q_size + 2 * step.shape.kv_heads * dim);
    out.heads = values(rows, q_size);
    out.sum = values(rows, stack.hidden);
    out.both = values(rows, 2 * stack.ffn);
    out.inner = values(rows, stack.ffn);
    out.logits = values(std::is_same_v<T, float> ? 0 : step.num_wanted, stack.head.outputs);
    out.laid = take(Products::laid_bytes(rows, std::max({stack.hidden, q_size, stack.ffn})));
    return at;
}

// Calls task with the products of a stack, and the stack.
template <typename Task>
auto with_products(const void *stack, Task task) {
    switch (static_cast<const Stack<float> *>(stack)->kind) {
#ifdef HAS_PAIRS
        case TILES: return task(TileProducts(), *static_cast<const Stack<BFloat16> *>(stack));
#endif
        case LANES_BFLOAT16: return task(LaneProducts<BFloat16>(), *static_cast<const Stack<BFloat16> *>(stack));
        default: return task(LaneProducts<float>(), *static_cast<const Stack<float> *>(stack));
    }
}

}  // namespace

extern "C" {
// Bytes of the room that `stack_run` needs.
long stack_room(const void *stack, const Step *step) {
    return with_products(stack, [&](auto products, const auto &own) {
        using Products = decltype(products);
        Scratch<typename Products::Value> scratch;
        return cut<Products>(own, *step, nullptr, scratch) + long(alignof(Phase));
    });
}

// tokens [rows] through all layers to logits [wanted rows, outputs of the head].
void stack_run(const void *stack, const Step *step, const int64_t *tokens, float *logits, char *room) {
    with_products(stack, [&](auto products, const auto &own) {
        using Products = decltype(products);
        Scratch<typename Products::Value> scratch;
        char *first = room + (alignof(Phase) - reinterpret_cast<uintptr_t>(room) % alignof(Phase)) % alignof(Phase);
        cut<Products>(own, *step, first, scratch);
        for (long at = 0; at < scratch.num_phases; at++) new (scratch.phases + at) Phase;
#pragma omp parallel num_threads(step->threads)
        Run<Products>(own, *step, scratch).all(tokens, logits);
    });
}
}
