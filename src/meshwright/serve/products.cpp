// The products of `products.hpp`.

#include "products.hpp"

#ifdef HAS_TILES

using namespace products;

extern "C" {
// Whether the system lets this process use the tiles.
int product_usable() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// out [rows, outputs] = x [rows, inputs] · Wᵀ + bias (fp32, whole panels of it, or null).
// tiles: room for x in tiles, 16 rows at a time, where there are more than 32; else null.
void product(const uint16_t *x, const uint16_t *weight, const float *bias, uint16_t *out, uint16_t *tiles, long rows,
             long inputs, long outputs, long threads) {
    long panels = (outputs + PANEL - 1) / PANEL;
    Rows where{tiles ? tiles : x, TILE * inputs, tiles ? TILE_SIZE : INPUTS, tiles ? 64 : 2 * inputs};
#pragma omp parallel num_threads(threads)
    {
        if (tiles) {
#pragma omp for schedule(static)
            for (long row = 0; row < rows; row++) lay_out(x, tiles, row, inputs);
        }
        long configured = -1;
#pragma omp for schedule(static)
        for (long panel = 0; panel < panels; panel++)
            run_panel(where, weight, bias, out, rows, inputs, outputs, panel, configured);
        _tile_release();
    }
}
}

#else

extern "C" {
int product_usable() { return 0; }
void product(const uint16_t *, const uint16_t *, const float *, uint16_t *, uint16_t *, long, long, long, long) {}
}

#endif
