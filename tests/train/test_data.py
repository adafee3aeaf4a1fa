"""Packed data: the same samples for every layout, and exact resuming."""

import numpy as np
import pytest
import torch

from meshwright.core.batch import IGNORE, documents_of
from meshwright.core.errors import InputError
from meshwright.train.data import EvaluationSet, PackedDataset

SEQ, BATCH, SEED = 4, 24, 11
LAYOUTS = [
    (dp, m, BATCH // dp // m) for dp in (1, 2, 3, 4, 6, 8, 12, 24) for m in (1, 2, 3, 4, 6) if BATCH % (dp * m) == 0
]


def dataset(num_samples=50, batch=BATCH, seed=SEED, mask=None, extra=0):
    tokens = np.arange(num_samples * SEQ + 1 + extra, dtype=np.uint16)
    return PackedDataset(tokens, SEQ, batch, seed, mask)


def samples_of(data, step, dp, m, b):
    """First tokens of every sample of a step, rank by rank."""
    firsts = []
    for dp_index in range(dp):
        batches = data.micro_batches(step, dp_index, dp, m, b)
        assert len(batches) == m
        for tokens, labels in batches:
            assert tokens.shape == labels.shape == (b, SEQ)
            assert tokens.dtype == labels.dtype == torch.int64
            firsts += tokens[:, 0].tolist()
    return [first // SEQ for first in firsts]


@pytest.mark.parametrize(("dp", "m", "b"), LAYOUTS)
def test_every_layout_sees_the_same_samples(dp, m, b):
    data = dataset()
    for step in (0, 1, 2, 5):
        assert sorted(samples_of(data, step, dp, m, b)) == sorted(data.batch(step).tolist())


def test_samples_depend_on_seed_and_step_alone():
    one, other = dataset(), dataset()
    other.batch(7)
    other.batch(0)
    assert (one.batch(3) == other.batch(3)).all()
    assert (one.batch(3) != dataset(seed=12).batch(3)).any()
    assert (one.batch(0) != one.batch(1)).any()


def test_the_order_never_changes_between_versions():
    """Golden: a changed order would silently break every resumed run."""
    assert dataset(num_samples=10, batch=10, seed=1).batch(0).tolist() == [9, 2, 4, 7, 5, 0, 8, 6, 3, 1]


@pytest.mark.parametrize("batch", [1, 7, 24, 50])
def test_each_epoch_holds_each_sample_once(batch):
    data = dataset(num_samples=50, batch=batch)
    stream = np.concatenate([data.batch(step) for step in range(-(-150 // batch))])[:150]
    epochs = stream.reshape(3, 50)
    assert (np.sort(epochs, axis=1) == np.arange(50)).all()
    assert (epochs[0] != epochs[1]).any()


def test_labels_are_the_next_tokens_across_sample_borders():
    tokens, labels = dataset().micro_batches(0, 0, 1, 1, BATCH)[0]
    assert (labels == tokens + 1).all()


def test_windows_cover_the_text_without_gap():
    data = dataset(num_samples=6, batch=6, extra=3)
    assert data.num_samples == 6
    tokens, labels = data.micro_batches(0, 0, 1, 1, 6)[0]
    assert sorted(tokens.flatten().tolist()) == list(range(24))
    assert sorted(labels.flatten().tolist()) == list(range(1, 25))


def test_masked_tokens_are_no_targets_and_ranks_may_differ():
    mask = np.ones(50 * SEQ + 1, bool)
    mask[1:30] = False
    data = dataset(mask=mask)
    counts = []
    for dp_index in range(4):
        for tokens, labels in data.micro_batches(0, dp_index, 4, 3, 2):
            wanted = torch.where(torch.from_numpy(mask)[tokens + 1], tokens + 1, IGNORE)
            assert (labels == wanted).all()
            counts.append(int((labels != IGNORE).sum()))
    assert len(set(counts)) > 1
    one = data.micro_batches(0, 0, 1, 1, BATCH)[0][1]
    assert sum(counts) == int((one != IGNORE).sum())


def test_mask_of_another_length_is_refused():
    with pytest.raises(InputError, match="5 entries for 201 tokens"):
        dataset(mask=np.ones(5, bool))


@pytest.mark.parametrize("new_batch", [24, 12, 5, 40])
def test_resume_neither_loses_nor_repeats_a_sample(new_batch):
    before = dataset(batch=24)
    seen = [before.batch(step) for step in range(3)]
    state = before.state_dict(3)
    after = dataset(batch=new_batch)
    after.load_state_dict(state)
    seen += [after.batch(step) for step in range(3, 3 + 300 // new_batch)]
    stream = np.concatenate(seen)[:150].reshape(3, 50)
    assert (np.sort(stream, axis=1) == np.arange(50)).all()
    assert after.consumed_samples(4) == 72 + new_batch


def test_resume_twice_is_exact():
    straight, resumed = dataset(), dataset()
    for step in (2, 5):
        state = resumed.state_dict(step)
        resumed = dataset()
        resumed.load_state_dict(state)
    assert (resumed.batch(9) == straight.batch(9)).all()
    with pytest.raises(InputError, match="step 4 lies before step 5"):
        resumed.batch(4)


@pytest.mark.parametrize(
    ("other", "name"),
    [(dataset(seed=3), "seed"), (dataset(num_samples=60), "num_tokens")],
)
def test_resume_with_other_data_is_refused(other, name):
    with pytest.raises(InputError, match=name):
        other.load_state_dict(dataset().state_dict(3))


def test_too_short_text_tells_the_numbers():
    with pytest.raises(InputError, match=r"96 tokens.*24 sequences of 4.*need 97"):
        PackedDataset(np.zeros(96, np.uint16), SEQ, BATCH, 0)
    assert PackedDataset(np.zeros(97, np.uint16), SEQ, BATCH, 0).num_samples == 24


def test_wrong_layout_tells_the_numbers():
    with pytest.raises(InputError, match=r"2 data-parallel ranks × 3 micro-batches × 5 samples = 30.*has 24"):
        dataset().micro_batches(0, 0, 2, 3, 5)


@pytest.mark.parametrize(("dp", "m", "b"), [(1, 1, 1), (2, 2, 2), (4, 1, 3), (1, 5, 8)])
def test_evaluation_covers_every_sample_once_under_every_layout(dp, m, b):
    evaluation = EvaluationSet(np.arange(17 * SEQ + 2, dtype=np.uint32), SEQ)
    seen = []
    for round_index in range(evaluation.num_rounds(dp * m * b)):
        for dp_index in range(dp):
            for tokens, labels in evaluation.micro_batches(round_index, dp_index, dp, m, b):
                assert tokens.shape == (b, SEQ)
                seen += labels[labels != IGNORE].tolist()
    assert sorted(seen) == list(range(1, 17 * SEQ + 1))


def test_evaluation_can_be_limited():
    evaluation = EvaluationSet(np.arange(17 * SEQ + 1), SEQ, max_samples=5)
    assert evaluation.num_rounds(2) == 3
    labels = evaluation.micro_batches(2, 0, 1, 1, 2)[0][1]
    assert labels.tolist() == [[17, 18, 19, 20], [IGNORE] * 4]
    with pytest.raises(InputError, match="for evaluation"):
        EvaluationSet(np.arange(SEQ), SEQ)


def test_documents_are_numbered_and_their_first_tokens_are_no_targets() -> None:
    """Token 9 ends a document; the label behind it belongs to another one."""
    tokens = np.array([1, 2, 9, 3, 4, 9, 9, 5, 6, 7, 8, 1, 2], np.uint16)
    (batch,) = EvaluationSet(tokens, 12, end_of_text=9).micro_batches(0, 0, 1, 1, 1)
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1, 1, 2, 3, 3, 3, 3, 3]]
    assert batch[0].tolist() == [tokens[:-1].tolist()]
    assert batch[1].tolist() == [[2, 9, IGNORE, 4, 9, IGNORE, IGNORE, 6, 7, 8, 1, 2]]
    (plain,) = EvaluationSet(tokens, 12).micro_batches(0, 0, 1, 1, 1)
    assert documents_of(plain) is None
    assert plain[1].tolist() == [tokens[1:].tolist()]
