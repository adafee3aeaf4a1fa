"""Products of few shapes."""

from __future__ import annotations

import pytest
import torch

from meshwright.serve.linear import PackedProduct, padded


def test_rows_are_padded_to_few_numbers():
    found = [padded(rows) for rows in range(1, 257)]
    assert all(rows <= more <= rows * 1.25 for rows, more in enumerate(found, start=1))
    assert found[:8] == list(range(1, 9))  # a single stream, and a few, pay nothing
    assert len(set(found)) == 8 + 4 * 5


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="products stay plain")
def test_padded_products_are_the_plain_ones():
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(*shape, generator=generator) for shape in ((24, 16), (24,)))
    product, shapes = PackedProduct(weight, bias), set()
    inner = product._linear

    def watched(x: torch.Tensor, *more: object) -> torch.Tensor:
        shapes.add(x.shape[-2])
        return inner(x, *more)

    product._linear = watched
    for rows in range(1, 65):
        x = torch.randn(1, rows, 16, generator=generator)
        with torch.inference_mode():
            torch.testing.assert_close(product(x), torch.nn.functional.linear(x, weight, bias))
    assert len(shapes) == 8 + 4 * 3
