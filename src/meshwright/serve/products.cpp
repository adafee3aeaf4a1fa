// The products of `products.hpp`.

#include "products.hpp"

#ifdef HAS_PAIRS

using namespace products;

extern "C" {
// Whether the system lets this process use the tiles, where it is tiles that multiply.
int product_usable() {
#ifdef HAS_TILES
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
    return 1;
#endif
}

// Whether `product` wants room for so many rows of x, 16 at a time.
int product_lays_out(long rows) { return Unit::lays_out(rows); }

// out [rows, outputs] = x [rows, inputs] · Wᵀ + bias (fp32, whole panels of it, or null).
// tiles: room for x in tiles, 16 rows at a time, where `product_lays_out`; else null.
void product(const uint16_t *x, const uint16_t *weight, const float *bias, uint16_t *out, uint16_t *tiles, long rows,
             long inputs, long outputs, long threads) {
    long panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel num_threads(threads)
    {
        if (tiles) {
#pragma omp for schedule(static)
            for (long row = 0; row < rows; row++) lay_out(x, tiles, row, inputs);
        }
        Unit unit;
#pragma omp for schedule(static)
        for (long panel = 0; panel < panels; panel++)
            unit.panel(x, tiles, weight, bias, out, rows, inputs, outputs, panel);
        unit.release();
    }
}
}

#else

extern "C" {
int product_usable() { return 0; }
int product_lays_out(long) { return 0; }
void product(const uint16_t *, const uint16_t *, const float *, uint16_t *, uint16_t *, long, long, long, long) {}
}

#endif
