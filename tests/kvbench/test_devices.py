"""A model spread over several places by accelerate: the same tokens as in one, whatever the policy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kv_models import prompt, tiny
from transformers import AutoModelForCausalLM

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.cache.step import append
from kvbench.engine.generate import generate_tokens
from kvbench.models.files import ModelSpec
from kvbench.models.loading import load, locate
from kvbench.policies.observation import AttentionParams
from kvbench.policies.policy import Policy

LAYERS = 3
POLICIES = {
    "full": {},
    "snapkv": {"window": 4},
    "cake": {"window": 4},  # shares out over all layers
    "kvec": {"window": 4},  # tells the next layer what this one kept
    "h2o": {},
    "sirllm": {},  # scores with what the output layer says
    "d2o": {},
}


def policy(slug: str) -> Policy:
    return make_policy(slug, None if slug == "full" else 12, **POLICIES[slug])


def tokens(model: Any, slug: str) -> list[list[int]]:
    return generate_tokens(model, torch.tensor([prompt(40)]), policy(slug), max_new_tokens=6).tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("spread")
    tiny(layers=LAYERS, dtype=torch.float32).save_pretrained(where)
    return where


def spread(folder: Path, offload: Path, **places: str | int) -> Any:
    """The model with some of its parts elsewhere than on the CPU."""
    parts = ["embed_tokens", *(f"layers.{i}" for i in range(LAYERS)), "norm", "rotary_emb"]
    everywhere: dict[str, str | int] = {f"model.{part}": "cpu" for part in parts} | {"lm_head": "cpu"}
    chosen = {part.replace("__", "."): where for part, where in places.items()}
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=everywhere | chosen, offload_folder=offload)
    return prepare(model)


def test_layers_on_disk_change_no_token(folder: Path, tmp_path: Path) -> None:
    model = spread(folder, tmp_path, model__layers__1="disk", lm_head="disk")
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu", "meta"}  # not here before their turn
    whole = prepare(AutoModelForCausalLM.from_pretrained(folder))
    for slug in POLICIES:
        assert tokens(model, slug) == tokens(whole, slug), slug


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_layers_on_two_devices_change_no_token(folder: Path, tmp_path: Path) -> None:
    from accelerate import dispatch_model

    whole = prepare(AutoModelForCausalLM.from_pretrained(folder))
    expected = {slug: tokens(whole, slug) for slug in POLICIES}
    parts = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    rest = {"model.layers.1": 0, "model.layers.2": 0, "model.norm": 0}
    model = dispatch_model(whole, parts | rest, main_device="cpu")
    for slug in POLICIES:
        done = generate_tokens(model, torch.tensor([prompt(40)]), policy(slug), max_new_tokens=6)
        assert [layer.positions.device.type for layer in done.cache.layers] == ["cpu", "cuda", "cuda"]
        assert done.tokens == expected[slug], slug


def test_every_layer_gets_the_positions_of_a_step_on_its_device() -> None:
    """The meta device stands for a second one."""
    model = prepare(tiny())
    sequence = KVCache(model.config, make_policy("snapkv", 12, window=4), prompt_length=20).sequence
    sequence.begin_call(20, 20)
    (span,) = sequence.spans
    assert (span.start, span.end, span.evicts) == (0, 20, True)
    for where in ("cpu", "meta"):
        new = (torch.zeros(1, heads, 20, 8, device=where) for heads in (4, 2, 2))
        step = append(sequence, where == "meta", span, *new, AttentionParams(1.0))
        assert step.positions.device.type == step.observation.seen.device.type == where


def test_the_device_map_of_a_model_is_followed_and_recorded(tiny_model: Path) -> None:
    loaded = load(locate(ModelSpec(name="tiny", path=str(tiny_model), device_map="auto")), torch.device("cpu"))
    assert loaded.record["device_map"] == {"": "cpu"}
    assert "device_map" not in load(locate(ModelSpec(name="tiny", path=str(tiny_model))), torch.device("cpu")).record
