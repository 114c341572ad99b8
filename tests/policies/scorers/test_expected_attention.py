"""Expected attention: tokens that queries of the same distribution, further on, would attend to."""

import pytest
import torch
from kv_crafted import Crafted, drawn
from kv_models import rotated
from kvpress_kept import assert_same, presses

from kvbench import make_policy


def test_moments_of_large_means_do_not_cancel() -> None:
    q, k, v = (x.float() for x in drawn(60, 1, 1))
    large = torch.stack([rotated(rotated(x, -t) / 100 + 300, t) for t, x in enumerate(q[0, 0])])[None, None]
    layer = Crafted(make_policy("expected_attention", 20), prompt_length=60)
    for some in zip(*(x.split(7, 2) for x in (large, k, v)), strict=True):
        layer.call(*some)
    memory = layer.cache.sequence.layers[0].memory
    exact = torch.stack([rotated(x.double(), -t) for t, x in enumerate(large[0, 0])])[4:]
    expected = (exact - exact.mean(0)).T @ (exact - exact.mean(0))
    torch.testing.assert_close(memory["scatter"][0, 0].double(), expected, rtol=0.05, atol=1e-3)
    assert memory["count"].tolist() == [56]


def test_kvpress_keeps_the_same() -> None:
    kvpress = presses()
    cases = [
        ({}, {}),
        ({"covariance": False}, {"use_covariance": False}),
        ({"future": 32, "epsilon": 0.02}, {"n_future_positions": 32, "epsilon": 0.02}),
        ({"values": False, "sinks": 2}, {"use_vnorm": False, "n_sink": 2}),
    ]
    for ours, theirs in cases:
        assert_same("expected_attention", kvpress.ExpectedAttentionPress(**theirs), 35, 90, **ours)


CASES = [
    ("expected_attention", "prompt"),
    ("expected_attention", "blocks"),
    ("capkv", "blocks"),
    ("caote_expected_attention", "blocks"),
    ("global_expected_attention", "prompt"),
]


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_moments_are_freed_after_the_prompt_if_decoding_evicts_nothing(name: str, schedule: str) -> None:
    q, k, v = (x.float() for x in drawn(70, 1, 1))
    layers, kept = {}, {}
    other = "global_knorm" if name.startswith("global") else "knorm"
    for policy, decode in ((name, "grow"), (name, "evict"), (other, "grow")):
        layer = Crafted(make_policy(policy, 20, schedule=schedule, decode=decode), prompt_length=60)
        layer.call(q[:, :, :60], k[:, :, :60], v[:, :, :60])
        layers[policy, decode], kept[policy, decode] = layer, layer.kept()
    assert kept[name, "grow"] == kept[name, "evict"]
    assert layers[name, "grow"].cache.nbytes == layers[other, "grow"].cache.nbytes < layers[name, "evict"].cache.nbytes


def test_another_prompt_is_scored_by_its_own_moments() -> None:
    q, k, v = (x.float() for x in drawn(100, 1, 1))
    layer = Crafted(make_policy("expected_attention", 20, decode="grow"), prompt_length=60)
    layer.call(q[:, :, :60], k[:, :, :60], v[:, :, :60])
    first = layer.kept()
    layer.cache.next_prompt(40)
    layer.call(q[:, :, 60:], k[:, :, 60:], v[:, :, 60:])
    assert len(layer.kept()[0]) == 20 != len({*first[0]} & {*layer.kept()[0]})
    assert layer.cache.sequence.layers[0].memory == {}
