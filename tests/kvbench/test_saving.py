"""A cache as a file: what follows comes out as it would have from the cache that was saved; a wrong file is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_models import CodePoints, prompt, tiny
from kv_presets import kinds, stores
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import kvbench.cache.saving as saving
from kvbench import KVCache, make_policy
from kvbench.engine.pre_pass import rate_next
from kvbench.engine.prefill import prefill
from kvbench.policies.policy import Policy

LAYERS, KV_HEADS, QUERY_HEADS, BUDGET = 2, 2, 4, 40
PROMPT, ANSWER, TURN = 57, 6, 21
SMALL: dict[str, dict[str, Any]] = {
    "kivi": {"group": 8, "residual": 16},
    "ott": {"group": 8, "residual": 5, "auxiliary": 4, "skip_layers": [0]},
    "kcvc": {"group": 8, "residual": 8},
    "gear": {"group": 8, "gap": 5, "outlier_ratio": 0.25},
    "zipcache": {"gap": 5},
}
STORES = {name: SMALL.get(name, {}) for name in stores()}
"""Small groups, so that codes, tails and pools are all in use, and codes are made after the cache was saved too."""
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("kcvc", {"group": None, "residual": 8}),
    ("gear", {"group": 8, "gap": 5, "gear_prompt": "never"}),
    ("ott", {"group": 8, "residual": 5, "pool_scope": "layer", "on_evict": "discard"}),
    *((f"{slug}_{store}", {"window": 8, **{f"store.{k}": v for k, v in STORES[store].items()}})
      for slug, store in (("ada_snapkv", "ott"), ("snapkv", "zipcache"), ("cake", "kcvc"))),
    ("snapkv", {"window": 8, "decode": "evict", "granularity": "query_head"}),
    ("ada_snapkv", {"window": 8, "decode": "evict"}),
    ("caote_h2o", {"block": 16}),
    ("h2o", {"late": True}),
]  # fmt: skip


@cache
def model(family: str = "llama", dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    made = tiny(family, kv_heads=KV_HEADS, layers=LAYERS, dtype=dtype)
    made.set_attn_implementation("kvbench")
    return made


@pytest.fixture(scope="module")
def importance(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("headkv") / "importance.json"
    file.write_text(json.dumps({f"{i}-{h}": [1.0 + i + h] for i in range(LAYERS) for h in range(QUERY_HEADS)}))
    return file


def built(slug: str, importance: Path) -> Policy:
    fields = {"importance": str(importance)} if slug.startswith("headkv") else STORES.get(slug, {})
    return make_policy(slug, BUDGET, **fields)


def decoded(held: KVCache, running: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits [n,B,V] after each of the tokens [B,n], given one by one."""
    out = []
    for step in range(ids.shape[1]):
        rate_next(held, torch.zeros(len(ids), 2 + step % 5), torch.zeros(len(ids), 1, dtype=torch.long))
        out.append(running(ids[:, step : step + 1], past_key_values=held).logits[:, -1])
    return torch.stack(out)


def copied(held: KVCache, path: Path) -> KVCache:
    held.save(path)
    return type(held).load(path, held.config, held.policy)


def assert_same(held: KVCache, loaded: KVCache) -> None:
    """Equal in all that can be seen of them, memory included: how a tensor lies decides how products with it round."""
    held.audit()
    loaded.audit()
    for mine, its in zip(held.layers, loaded.layers, strict=True):
        for a, b in ((mine.keys, its.keys), (mine.values, its.values), (mine.positions, its.positions)):
            assert (a.dtype, a.stride()) == (b.dtype, b.stride())
            assert torch.equal(a, b)
    for part, other in zip(held.group.layers, loaded.group.layers, strict=True):
        for told, read in ((part.store.state, other.store.state), (part.memory, other.memory)):
            torch.testing.assert_close(told, read, rtol=0, atol=0, equal_nan=True)  # a threshold not yet set is NaN
        assert part.counts == other.counts
        assert part.store.sizes().kinds == other.store.sizes().kinds
    for name in ("nbytes", "spare_nbytes", "peak_nbytes", "seen"):
        assert getattr(held, name) == getattr(loaded, name), name
    assert held.group.progress.prompt == loaded.group.progress.prompt
    assert not held.policy.evicts or held.group.at_budget == loaded.group.at_budget


def assert_goes_on(policy: Policy, running: PreTrainedModel, path: Path) -> None:
    """Saved after the prompt, and again after some decoding; then a later prompt, where the policy takes one."""
    ids = torch.tensor([prompt(PROMPT + 3 * ANSWER + TURN)])
    first, answer, turn, more, rest = ids.split([PROMPT, ANSWER, TURN, ANSWER, ANSWER], dim=1)
    held = KVCache(running.config, policy, PROMPT, question=PROMPT - ANSWER)
    prefill(running, first, held, CodePoints())
    loaded = copied(held, path)
    assert_same(held, loaded)
    assert torch.equal(decoded(held, running, answer), decoded(loaded, running, answer))
    loaded = copied(loaded, path)
    assert_same(held, loaded)
    if not policy.evicts or policy.store.reopens:
        for one in (held, loaded):
            one.next_prompt(TURN, question=TURN - ANSWER)
        assert torch.equal(*(prefill(running, turn, one, CodePoints()) for one in (held, loaded)))
        assert_same(held, loaded)
    assert torch.equal(decoded(held, running, more), decoded(loaded, running, more))
    loaded = copied(held, path)
    assert torch.equal(decoded(held, running, rest), decoded(loaded, running, rest))
    assert_same(held, loaded)


FAST = {*kinds(), "headkv_r", "d2o_released", "full", *STORES}  # one for every combination of parts


@torch.inference_mode()
@pytest.mark.parametrize("slug", sorted(FAST))
def test_every_preset_goes_on_as_if_it_had_never_been_saved(slug: str, importance: Path, tmp_path: Path) -> None:
    """In 16 bits where a store holds codes."""
    running = model("llama", torch.bfloat16 if slug in STORES else torch.float64)
    assert_goes_on(built(slug, importance), running, tmp_path / "cache.safetensors")


@torch.inference_mode()
@pytest.mark.parametrize(("slug", "fields"), VARIANTS, ids=str)
def test_every_store_goes_on_in_each_of_its_ways(slug: str, fields: dict[str, Any], tmp_path: Path) -> None:
    assert_goes_on(make_policy(slug, BUDGET, **fields), model(), tmp_path / "cache.safetensors")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@torch.inference_mode()
@pytest.mark.parametrize("slug", ["full", "h2o", "ada_snapkv", *STORES])
def test_a_cache_of_a_gpu_goes_on_there(slug: str, importance: Path, tmp_path: Path) -> None:
    running, path = tiny(kv_heads=KV_HEADS, layers=LAYERS, dtype=torch.bfloat16).to("cuda"), tmp_path / "cache"
    running.set_attn_implementation("kvbench")
    ids = torch.tensor([prompt(PROMPT + ANSWER)], device="cuda")
    held = KVCache(running.config, built(slug, importance), prompt_length=PROMPT)
    prefill(running, ids[:, :PROMPT], held)
    held.save(path)
    loaded = KVCache.load(path, held.config, held.policy, device="cuda")
    assert_same(held, loaded)
    assert {layer.positions.device.type for layer in loaded.layers} == {"cuda"}
    assert torch.equal(*(decoded(one, running, ids[:, PROMPT:]) for one in (held, loaded)))
    assert_same(held, loaded)


@torch.inference_mode()
def test_a_document_is_compressed_once_and_asked_twice_by_generate(tmp_path: Path) -> None:
    """The example of `KVCache`; the other way is to ask the cache that read the document."""
    running, policy, path = model(), make_policy("snapkv", 24, window=8), tmp_path / "document.safetensors"
    document, *questions = (torch.tensor([prompt(n, seed=n)]) for n in (60, 12, 17))
    cache = KVCache(running.config, policy)
    running(document, past_key_values=cache)
    cache.save(path)
    for question in questions:
        ids, answers = torch.cat([document, question], dim=1), []
        fresh = KVCache(running.config, policy)
        running(document, past_key_values=fresh)
        for one in (fresh, KVCache.load(path, running.config, policy)):
            one.next_prompt(question.shape[1])
            answers.append(running.generate(ids, past_key_values=one, max_new_tokens=8, do_sample=False).tolist())
        assert answers[0] == answers[1]


# the file


@pytest.fixture
def filled() -> Iterator[KVCache]:
    with torch.inference_mode():
        held = KVCache(model().config, make_policy("h2o", BUDGET))
        model()(torch.tensor([prompt(PROMPT)]), past_key_values=held)
        yield held


def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    filled: KVCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache.safetensors"
    path.write_text("old")

    def full_disk(tensors: dict[str, Tensor], place: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, place, metadata)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        filled.save(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "old"


# refusals


@torch.inference_mode()
@pytest.mark.parametrize("slug", ["h2o", "kivi"])
def test_a_prompt_still_coming_in_is_refused(slug: str, importance: Path, tmp_path: Path) -> None:
    held = KVCache(model().config, built(slug, importance), prompt_length=50)
    model()(torch.tensor([prompt(30)]), past_key_values=held)
    with pytest.raises(ValueError, match=r"only after a whole prompt and between calls of the model"):
        held.save(tmp_path / "cache")
    assert not list(tmp_path.iterdir())


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change a file's header, with the sum that belongs to it."""

    def edit(path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()["kvbench"])
        tensors = load_file(path)
        change(header)
        del header["sha256"]
        total = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
        for name in sorted(tensors):
            total.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
            total.update(tensors[name].numpy().tobytes())
        save_file(tensors, path, {"kvbench": json.dumps({**header, "sha256": total.hexdigest()})})

    return edit


def class_of_the_progress(header: dict[str, Any], name: str) -> None:
    (held,) = (value for key, value in header["state"]["parts"] if key == "progress")
    held["class"] = name


WRONG = r"^.*/cache is damaged, or was not written by KVCache\.save$"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, r"there is no file .*cache"),
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-100]), WRONG),
    "other tensors": (lambda path: save_file({"x": torch.ones(2)}, path), WRONG),
    "no header": (lambda path: save_file({}, path, {"kvbench": "{}"}), WRONG),
    "another format": (edited(lambda header: header.update(format=99)), r"has format 99, but .* reads format"),
    "a class of another package": (
        edited(lambda header: class_of_the_progress(header, "os.system")),
        r"contains a os\.system, but only classes of kvbench can be loaded",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_or_foreign_file_is_refused_in_one_sentence(kind: str, filled: KVCache, tmp_path: Path) -> None:
    damage, sentence = DAMAGE[kind]
    path = tmp_path / "cache"
    filled.save(path)
    damage(path)
    with pytest.raises(ValueError, match=sentence) as caught:
        KVCache.load(path, filled.config, filled.policy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("slug", ["ada_snapkv", "ott"])
def test_no_bit_is_lost_unnoticed(slug: str, importance: Path, tmp_path: Path) -> None:
    """Neither in the header nor in a tensor, nor by a file that ends early: one sentence that names the file."""
    path, held = tmp_path / "cache", KVCache(model().config, built(slug, importance), prompt_length=PROMPT)
    with torch.inference_mode():
        prefill(model(), torch.tensor([prompt(PROMPT)]), held)
    held.save(path)
    whole = path.read_bytes()
    for at in (*range(9, len(whole), len(whole) // 60), len(whole) - 1):
        for damaged in (whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :], whole[:at]):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=WRONG):
                KVCache.load(path, held.config, held.policy)


@pytest.mark.parametrize(
    ("slug", "fields", "sentence"),
    [
        ("h2o", {"budget": 41}, r"saved for policy\.budget=40, not 41"),
        ("h2o", {"block": 16}, r"saved for policy\.schedule=.*Prompt.*, not .*Blocks"),
        ("full", {"budget": None}, r"saved for policy\.scorer=.*H2O.*, not None"),
    ],
)
def test_another_policy_is_refused(
    slug: str, fields: dict[str, Any], sentence: str, filled: KVCache, tmp_path: Path
) -> None:
    filled.save(tmp_path / "cache")
    with pytest.raises(ValueError, match=sentence):
        KVCache.load(tmp_path / "cache", filled.config, make_policy(slug, **{"budget": BUDGET, **fields}))


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (lambda: tiny("qwen2").config, r"saved for model\.model_type=llama, not qwen2"),
        (lambda: tiny(kv_heads=4).config, r"KV heads and head dim=\[\[2, 8\], \[2, 8\]\], not \[\[4, 8\], \[4, 8\]\]"),
        (lambda: with_theta(5000.0), r"model\.rope_parameters=.*10000\.0.*, not .*5000\.0"),
    ],
)
def test_another_model_is_refused(other: Callable[[], Any], sentence: str, filled: KVCache, tmp_path: Path) -> None:
    filled.save(tmp_path / "cache")
    with pytest.raises(ValueError, match=sentence):
        KVCache.load(tmp_path / "cache", other(), filled.policy)


def with_theta(theta: float) -> Any:
    config = tiny().config
    config.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
    return config
