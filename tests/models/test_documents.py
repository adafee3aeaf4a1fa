"""Documents that share a sequence, on one process: each is as if it were alone."""

import pytest
import torch

from meshwright.core.batch import Places
from meshwright.models.documents import document_mask, position_ids
from tests.models.tiny import SPECS, random_model, random_tokens

DENSE = {name: spec for name, spec in SPECS.items() if not spec.num_experts}
"""Experts with a capacity look at all tokens of a batch."""


@pytest.mark.parametrize("spec", DENSE.values(), ids=DENSE.keys())
def test_each_document_is_as_if_alone(spec):
    """Rotary tables are fp32: turned on by the same angle, a document is the same but for their rounding."""
    model, tokens = random_model(spec, torch.float64), random_tokens(spec, 2, 15)
    documents = torch.tensor([[0] * 6 + [1] * 9, [0] * 1 + [4] * 4 + [5] * 10])
    allowed = 1e-10 if spec.positions == "learned" else 2e-6
    together = model(tokens, Places(15, None, documents))
    for row, parts in enumerate(((6, 9), (1, 4, 10))):
        alone = torch.cat([model(part.unsqueeze(0))[0] for part in tokens[row].split(parts)])
        torch.testing.assert_close(together[row], alone, rtol=allowed, atol=allowed)
    assert not torch.allclose(together, model(tokens))


def test_one_document_is_the_whole_sequence():
    spec = SPECS["gpt2"]
    model, tokens = random_model(spec, torch.float64), random_tokens(spec, 2, 9)
    places = Places(9, None, torch.zeros(2, 9, dtype=torch.int64))
    torch.testing.assert_close(model(tokens, places), model(tokens), rtol=1e-12, atol=1e-12)


def test_masks_and_positions_by_hand():
    documents = torch.tensor([[0, 0, 1, 2, 2]])
    mask = document_mask(documents)[0].int().tolist()
    assert mask == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    cpu = torch.device("cpu")
    assert position_ids(5, cpu, Places(5, None, documents)).tolist() == [[0, 1, 0, 0, 1]]
    here = torch.tensor([1, 4])
    assert position_ids(2, cpu, Places(5, here, documents)).tolist() == [[1, 1]]
    assert position_ids(2, cpu, Places(5, here)).tolist() == [1, 4]
    assert position_ids(2, cpu, None).tolist() == [0, 1]
