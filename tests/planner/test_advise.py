"""The table of advice: every combination of facts gets exactly the rows that the table of the field states."""

from __future__ import annotations

from dataclasses import fields
from itertools import product

import pytest

from meshwright.core.cluster import Link
from meshwright.core.job import Job
from meshwright.core.serving import Requests
from meshwright.planner.advise import ADVICE_RULES, Facts, advise, advise_on, advise_serving, facts

BOOLEANS = [f.name for f in fields(Facts) if f.type == "bool"]
SIZES = [(1, 1), (8, 1), (16, 2)]


def expected(num_devices: int, num_nodes: int, on: dict[str, bool]) -> set[str]:
    """The decision table once more, by hardware first, as it is published."""
    fits, layer_fits = on["fits_one_device"], on["largest_layer_fits"]
    if num_devices == 1:
        ids = {"S1"} if fits else ({"S2"} if layer_fits else {"S2", "S3"})
    else:
        ids = {"N4"}
        if fits:
            ids |= {"G1"}
        elif on["many_layers"]:
            ids |= {"G3"}
        if num_nodes == 1:
            ids |= {"N1"} if fits else ({"N2"} if on["fast_intra"] else {"N3"})
        else:
            ids |= {"G6"}
            if on["fast_inter"]:
                ids |= {"M1"}
            elif not on["fits_one_node"]:
                ids |= {"M2"}
    if not fits and not layer_fits:
        ids |= {"G2"}
    ids |= {"G4"} if on["is_training"] else {"G5"}
    named = {"long_context": "G7", "has_experts": "G8", "is_huge": "P1"}
    return ids | {id for fact, id in named.items() if on[fact]}


def test_every_combination():
    count = 0
    for (num_devices, num_nodes), values in product(SIZES, product((False, True), repeat=len(BOOLEANS))):
        on = dict(zip(BOOLEANS, values, strict=True))
        found = {rule.id for rule in advise_on(Facts(num_devices=num_devices, num_nodes=num_nodes, **on))}
        assert found == expected(num_devices, num_nodes, on), (num_devices, on)
        count += 1
    assert count == 3 * 2 ** len(BOOLEANS)


def test_rows_are_unique_and_sourced():
    ids = [rule.id for rule in ADVICE_RULES]
    assert ids == ["S1", "S2", "S3", "N1", "N2", "N3", "N4", "M1", "M2", *(f"G{i}" for i in range(1, 9)), "P1"]
    assert all(rule.advice and rule.source for rule in ADVICE_RULES)


def test_facts_of_a_large_model_on_one_large_cluster(llama_70b, cluster):
    known = facts(llama_70b, cluster(128, 8), Job(seq_length=8192, global_batch_size=1024))
    assert not known.fits_one_device
    assert known.largest_layer_fits
    assert known.many_layers
    assert known.is_huge
    assert known.fast_intra
    assert known.fast_inter
    assert not known.fits_one_node
    assert not known.has_experts


def test_facts_count_states_and_activations_not_weights_only(llama_70b, cluster):
    """141 GB of bf16 weights, 1.27 TB of states."""
    job = Job(seq_length=128, global_batch_size=1)
    enough_for_weights = cluster(1, 1, memory_bytes=200 * 10**9)
    assert not facts(llama_70b, enough_for_weights, job).fits_one_device
    assert facts(llama_70b, cluster(1, 1, memory_bytes=2000 * 10**9), job).fits_one_device


@pytest.mark.parametrize(("bandwidth", "id"), [(450e9, "N2"), (30e9, "N3")])
def test_the_link_decides_between_n2_and_n3(llama_70b, cluster, bandwidth, id):
    link = Link(name="l", bandwidth_bytes_per_s=bandwidth, latency_s=1e-6)
    machines = cluster(1, 8).model_copy(update={"intra_link": link})
    assert id in dict(advise(llama_70b, machines, Job(seq_length=4096, global_batch_size=8)))


def test_slow_network_and_short_memory(llama_70b, cluster):
    slow = Link(name="l", bandwidth_bytes_per_s=1e9, latency_s=1e-5)
    machines = cluster(8, 8).model_copy(update={"inter_link": slow})
    ids = dict(advise(llama_70b, machines, Job(seq_length=4096, global_batch_size=64)))
    assert "M2" in ids
    assert "M1" not in ids


def test_long_context_grows_with_the_sequence(llama_70b, cluster):
    for length, long in ((1024, False), (131072, True)):
        assert facts(llama_70b, cluster(), Job(seq_length=length, global_batch_size=1)).long_context is long


def test_rules_that_speak_of_serving(llama_70b, cluster):
    """Weights and a cache: what does not fit one device to be trained may fit it to be served."""
    requests = Requests(prompt_tokens=2048, output_tokens=256, rate_per_s=1)

    def held(memory_bytes: int) -> set[str]:
        found = advise_serving(llama_70b, cluster(1, 8, memory_bytes=memory_bytes), requests)
        return {rule.id for rule, holds in found if holds}

    assert held(80 * 10**9) == {"N4", "G3", "G5"}
    assert held(200 * 10**9) == {"N4", "G1", "G5"}
