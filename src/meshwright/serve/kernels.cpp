// The kernels of `kernels.hpp` and `attention.hpp`, by dtype.

#include "attention.hpp"

template void Attention::run(long, const Rows<float> &) const;
template void Attention::run(long, const Rows<BFloat16> &) const;

extern "C" {
void attention_float32(const Step *step, float *q, float *k, const float *v, long q_stride, long k_stride,
                       long v_stride, float *keys, float *values, float *out) {
    attend_step(*step, q, k, v, q_stride, k_stride, v_stride, keys, values, out);
}
void attention_bfloat16(const Step *step, BFloat16 *q, BFloat16 *k, const BFloat16 *v, long q_stride, long k_stride,
                        long v_stride, BFloat16 *keys, BFloat16 *values, BFloat16 *out) {
    attend_step(*step, q, k, v, q_stride, k_stride, v_stride, keys, values, out);
}
void norm_float32(const float *x, const float *weight, float *out, long rows, long size, float eps, long threads) {
    norm(x, weight, out, rows, size, eps, threads);
}
void norm_bfloat16(const BFloat16 *x, const BFloat16 *weight, BFloat16 *out, long rows, long size, float eps,
                   long threads) {
    norm(x, weight, out, rows, size, eps, threads);
}
void gated_float32(const float *gate, const float *up, float *out, long rows, long size, long stride, long threads) {
    gated(gate, up, out, rows, size, stride, threads);
}
void gated_bfloat16(const BFloat16 *gate, const BFloat16 *up, BFloat16 *out, long rows, long size, long stride,
                    long threads) {
    gated(gate, up, out, rows, size, stride, threads);
}
void largest_float32(const float *rows, float *values, int64_t *places, long num_rows, long size, long threads) {
    largest(rows, values, places, num_rows, size, threads);
}
}
