// The products of `lanes.hpp`, by dtype.

#include "lanes.hpp"

template void lanes::run_panel(const float *, const float *, const float *, float *, long, long, long, long);
template void lanes::run_panel(const float *, const BFloat16 *, const float *, BFloat16 *, long, long, long, long);

extern "C" {
// Outputs of a panel of a weight.
long lanes_panel() { return lanes::PANEL; }

// out [rows, outputs] = x [rows, inputs] · Wᵀ + bias (fp32, whole panels of it, or null).
// room: as many floats as x has elements, where x is not of floats.
void lanes_product_float32(const float *x, const float *weight, const float *bias, float *out, float *room, long rows,
                           long inputs, long outputs, long threads) {
    lanes::product(x, weight, bias, out, room, rows, inputs, outputs, threads);
}
void lanes_product_bfloat16(const BFloat16 *x, const BFloat16 *weight, const float *bias, BFloat16 *out, float *room,
                            long rows, long inputs, long outputs, long threads) {
    lanes::product(x, weight, bias, out, room, rows, inputs, outputs, threads);
}
}
