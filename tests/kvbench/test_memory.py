"""Predicted bytes are the measured ones, and the ratios those worked out by hand."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_hybrids import tiny_hybrid
from kv_models import prompt, tiny
from long_cache import limit_bits

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.memory import main
from kvbench.models.cache_shapes import CacheShape, cache_shape
from kvbench.tools.cache_bytes import predict

LLAMA = cache_shape("llama2_7b")
POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("kivi", {"group": 16, "residual": 16}),
    ("kivi", {"group": 16, "residual": 0, "bits": 4}),
    ("ott", {"group": 8, "residual": 5}),
    ("ott", {"group": 16, "residual": 0, "on_evict": "discard", "skip_layers": []}),
    ("ott", {}),  # nothing to compress
    ("kcvc", {"group": 16, "residual": 32}),
    ("kcvc", {"group": None, "residual": 32}),
    ("gear", {"group": 8}),
    ("zipcache", {"k": 0.5, "v": 0.7}),
    ("snapkv", {"budget": 40, "window": 8}),
    ("snapkv", {"budget": 0.3, "window": 8, "decode": "evict"}),
    ("snapkv", {"budget": 40, "window": 8, "decode": "evict", "every": 7}),
    ("h2o", {"budget": 40}),
    ("tova", {"budget": 200}),
    ("caote_snapkv", {"budget": 33, "window": 8, "block": 16}),
    ("pyramidkv", {"budget": 40, "window": 8}),
    ("snapkv_kivi", {"budget": 40, "window": 8, "store.group": 8, "store.residual": 8}),
    ("h2o_zipcache", {"budget": 40, "decode": "grow"}),
    ("snapkv_gear", {"budget": 40, "window": 8, "store.group": 8}),
    ("quest", {"budget": 64}),
]


@pytest.mark.parametrize(("slug", "fields"), POLICIES, ids=lambda x: str(x))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_predicted_bytes_equal_measured_bytes(slug: str, fields: dict[str, Any], dtype: torch.dtype) -> None:
    length, batch = 117, 2
    model = prepare(tiny("llama", dtype=dtype))
    policy = make_policy(slug, **fields)
    cache = KVCache(model.config, policy, prompt_length=length)
    with torch.inference_mode():
        model(torch.tensor([prompt(length, seed=s) for s in range(batch)]), past_key_values=cache)
    predicted = predict(policy, CacheShape(2, 4, 2, 8, dtype), length, batch)
    assert (predicted.nbytes, predicted.spare) == (cache.held_nbytes, cache.spare_nbytes)
    assert (predicted.spare > 0) == (policy.evicts and policy.schedule.decode == "evict" and length > policy.budget)
    if predicted.spare or policy.reader is not None:
        return  # the store's parts include the spare bytes, and not the page summaries
    measured: Counter[str] = Counter()
    for state in (one for layer in cache.layers for one in layer.states):
        measured.update(state.store.sizes().kinds)
    measured["queries"] = sum(state.recent.nbytes for layer in cache.layers for state in layer.states)
    assert Counter(predicted.parts) == measured  # counts of 0 are left out


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "lfm2", "nemotron_h"])
def test_predicted_bytes_of_a_hybrid_equal_measured_bytes(family: str, tmp_path: Path) -> None:
    """Of its attention layers, and the states beside them; bits per number are those of keys and values."""
    model = prepare(tiny_hybrid(family))
    model.config.save_pretrained(tmp_path)  # some say that a time step has no end: {"__float__": "Infinity"}
    shape = cache_shape(str(tmp_path))
    for policy in (make_policy("full"), make_policy("h2o", 40)):
        cache = KVCache(model.config, policy, prompt_length=117)
        with torch.inference_mode():
            model(torch.tensor([prompt(117), prompt(117, seed=1)]), past_key_values=cache)
        predicted = predict(policy, shape, 117, 2)
        assert (predicted.nbytes, predicted.spare) == (cache.held_nbytes, cache.spare_nbytes)
        assert predicted.parts["states"] == cache.state_nbytes
    assert predict(make_policy("full"), shape, 117).bits == 32 + 8 * 4 / (2 * 8), "numbers and positions"


@pytest.mark.parametrize(
    ("length", "ratios"),
    [
        (448, (3.079, 2.765, 2.923, 2.007)),
        (1024, (5.146, 4.197, 3.540, 3.091)),
        (4096, (6.491, 4.995, 5.679, 4.515)),
        (8192, (6.787, 5.159, 6.315, 4.890)),
        (32768, (7.027, 5.289, 6.894, 5.215)),
    ],
)
def test_ratios_to_a_16_bit_cache_are_those_worked_out_by_hand(length: int, ratios: tuple[float, ...]) -> None:
    slugs = ("kivi_g128_r128", "kivi_g32_r128", "ott_g128_r32_skipnone", "ott_g32_r128_skipnone")
    got = [predict(make_policy(slug), LLAMA, length).ratio for slug in slugs]
    assert got == pytest.approx(ratios, abs=6e-4)


@pytest.mark.parametrize(
    ("slug", "fields", "bits"),
    [
        ("kivi", {}, 2.25),
        ("kivi", {"metadata": "float32"}, 2.5),  # 16 / 2.5 = 6.40
        ("kivi_g64_r128", {}, 2.5),
        ("kivi_g32_r128", {}, 3.0),
        ("kivi_int4", {}, 4.25),
        ("ott", {}, 2.25),
        ("kcvc_g32_r128", {}, 3.0),
        ("full", {}, 16 + 16 / 128),  # an int32 position for the key and the value of a token
    ],
)
def test_each_further_token_takes_the_bits_of_the_formula(slug: str, fields: dict[str, Any], bits: float) -> None:
    assert limit_bits(make_policy(slug, **fields), LLAMA) == pytest.approx(bits, abs=1e-9)


def test_a_custom_model_file_contains_its_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(
        "defaults: [hub, _self_]\ndtype: float16\nshape: {layers: 2, query_heads: 4, kv_heads: 2, head_dim: 8}\n"
    )
    assert main(["--config-dir", str(tmp_path), "model=mine", "policy=full", "length=100"]) == 0
    assert str(2 * 2 * 100 * (2 * 8 * 2 + 4)) in capsys.readouterr().out  # layers, heads, tokens: key, value, position
    (tmp_path / "model" / "half.yaml").write_text("defaults: [hub, _self_]\ndtype: float16\nshape: {layers: 2}\n")
    assert main([f"--config-dir={tmp_path}", "model=half"]) == 2
    said = "shape={'layers': 2} is not allowed, it must have layers, query_heads, kv_heads, head_dim"
    assert said in capsys.readouterr().err


def test_the_command_prints_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=llama2_7b", "policy=ott,kivi,full", "length=4096,32768", "batch=1,64"]) == 0
    out = capsys.readouterr().out
    assert "330825728" in out  # 32 layers and heads of 4096 * 512 / 6.491 bytes
    assert str(64 * 330825728) in out
