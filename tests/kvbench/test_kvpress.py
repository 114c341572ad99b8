"""Presses of an installed kvpress under our prompts, samples and tables."""

import copy
import json
import math
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kv_models import prompt, tiny
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.cli import main
from kvbench.engine.generate import generate_tokens
from kvbench.errors import ConfigError, UsageError
from kvbench.policies.press import KVPress
from kvbench.policies.schedule import Prompt

kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed: pip install --no-deps kvpress cachetools")

NEW = 6
WRAPPED = {"AdaKVPress": "SnapKVPress", "ChunkKVPress": "SnapKVPress", "KeyRerotationPress": "KnormPress"}


def ids_of(tokens: int) -> Tensor:
    return torch.tensor([prompt(tokens)])


def made(name: str) -> Any:
    cls = getattr(kvpress, name)
    if name in WRAPPED:
        return cls(press=made(WRAPPED[name]))
    return cls(window_size=4) if name in ("SnapKVPress", "PyramidKVPress") else cls()


def policy(name: str, budget: float | None = None) -> KVPress:
    found = make_policy("kvpress", budget, press=made(name))
    assert isinstance(found, KVPress)
    return found


@pytest.fixture
def model() -> PreTrainedModel:
    return prepare(tiny(kv_heads=2))


def by_hand(model: PreTrainedModel, ids: Tensor, press: Any, question: int) -> list[int]:
    """The tokens of kvpress's own pipeline: the press while the context is read, then question and answer after it."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("sdpa")
    cache, tokens = DynamicCache(), ids.shape[1] - question

    def after(new: Tensor, place: int) -> Tensor:
        where = torch.arange(place, place + new.shape[1])
        out = model(new, past_key_values=cache, position_ids=where[None], cache_position=where)
        return out.logits[:, -1].argmax(-1)[None]

    with torch.inference_mode():
        with press(model):
            token = after(ids[:, :tokens], 0)
        for place in range(tokens, ids.shape[1]):
            token = after(ids[:, place, None], place)
        found = [int(token)]
        for place in range(ids.shape[1], ids.shape[1] + NEW - 1):
            token = after(token, place)
            found.append(int(token))
    return found


@pytest.mark.parametrize("question", [0, 5])
@pytest.mark.parametrize(
    "name", ["SnapKVPress", "KnormPress", "TOVAPress", "PyramidKVPress", "AdaKVPress", "KeyDiffPress"]
)
def test_a_press_writes_what_kvpress_s_own_pipeline_writes(model: PreTrainedModel, name: str, question: int) -> None:
    ids, press = ids_of(60), made(name)
    press.compression_ratio = 0.5
    ours = KVPress(press=copy.deepcopy(press), schedule=Prompt(decode="grow"))
    context = None if question == 0 else 60 - question
    got = generate_tokens(model, ids, ours, max_new_tokens=NEW, context_tokens=context)
    assert got.tokens[0] == by_hand(model, ids, press, question)


@pytest.mark.parametrize("budget", [7, 20, 33, 0.3])
def test_a_budget_in_tokens_is_kept_to_the_token_beside_what_was_generated(
    model: PreTrainedModel, budget: float
) -> None:
    got = generate_tokens(model, ids_of(61), policy("KnormPress", budget), max_new_tokens=NEW)
    kept = budget if isinstance(budget, int) else 18  # 0.3 of 61 tokens
    assert got.cache.kept_tokens().unique().tolist() == [kept + NEW - 1]
    assert got.cache.held_nbytes == 2 * sum(layer.keys.nbytes for layer in got.cache.layers)  # type: ignore[union-attr]
    assert got.cache.peak_nbytes > got.cache.held_nbytes


def test_a_press_with_a_threshold_has_no_budget(model: PreTrainedModel) -> None:
    press = kvpress.DMSPress(press=kvpress.KnormPress(), threshold=math.inf, sliding_window_size=20)
    ours = make_policy("kvpress", 20, press=press)
    assert ours.budget is None
    got = generate_tokens(model, ids_of(61), ours, max_new_tokens=NEW)
    assert got.cache.kept_tokens().unique().tolist() == [61 + NEW - 1], "masked tokens are held"
    assert got.tokens[0] == by_hand(model, ids_of(61), press, 0)
    with pytest.raises(ConfigError, match=r"press.threshold must be a score below which DMSPress evicts a token"):
        make_policy("kvpress", 20, press=kvpress.DMSPress(press=kvpress.KnormPress()))


def test_a_kvpress_that_cannot_be_imported_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(distribution: str) -> str:
        raise PackageNotFoundError(distribution)

    for module in [name for name in sys.modules if name.partition(".")[0] == "kvpress"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(ValueError, match=r"^kvpress .* cannot be imported \(.*\): pip install --no-deps kvpress"):
        make_policy("kvpress/KnormPress", 20)
    monkeypatch.setattr("kvbench.policies.press.version", absent)
    with pytest.raises(ValueError, match=r"kvpress, which is not installed: pip install --no-deps kvpress"):
        make_policy("kvpress/KnormPress", 20)


def test_the_model_is_ours_again_afterwards(model: PreTrainedModel) -> None:
    ids, ours = ids_of(40), make_policy("knorm", 20)
    before = generate_tokens(model, ids, ours, max_new_tokens=NEW).tokens
    own = model.model.layers[0].self_attn.rotary_emb = torch.nn.Identity()
    names = [name for name, _ in model.named_modules()]
    generate_tokens(model, ids, policy("AdaKVPress", 20), max_new_tokens=NEW)
    assert generate_tokens(model, ids, ours, max_new_tokens=NEW).tokens == before
    assert [name for name, _ in model.named_modules()] == names
    assert model.model.layers[0].self_attn.rotary_emb is own


def test_what_a_press_cannot_do_is_refused_in_a_sentence(model: PreTrainedModel) -> None:
    with pytest.raises(
        ValueError, match="kvpress compresses transformers' own cache, not ours, so it can only generate"
    ):
        KVCache(model.config, policy("KnormPress", 20))
    with pytest.raises(ConfigError, match="a press compresses the whole prompt once, then the cache grows"):
        make_policy("kvpress", 20, press="KnormPress", schedule="blocks")
    with pytest.raises(ConfigError, match=r"press=KnormPres is not in kvpress .* which has KnormPress"):
        make_policy("kvpress", 20, press="KnormPres")
    with pytest.raises(
        ConfigError, match="press=null must name a press of kvpress, such as policy=kvpress/SnapKVPress"
    ):
        make_policy("kvpress", 20)
    with pytest.raises(UsageError, match=r"SnapKVPress of kvpress cannot compress this prompt: .*window"):
        generate_tokens(model, ids_of(20), make_policy("kvpress", 8, press="SnapKVPress"), max_new_tokens=1)


def test_a_sweep_over_presses_has_samples_and_names_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["-m", "policy=kvpress/KnormPress,kvpress/TOVAPress", "budget=64", "task=niah", "task.lengths=[256]"]
    main([*line, "limit=2", f"out={tmp_path}", "compress=context"])
    told = capsys.readouterr().out
    assert "kvpress/KnormPress" in told
    assert "kvpress/TOVAPress" in told
    kept = [(yaml.safe_load(file.read_text()), file.parent) for file in tmp_path.glob("*/config.yaml")]
    runs = {config["identity"]["policy"]["press"]["class"]: folder for config, folder in kept}
    assert {name.rpartition(".")[2] for name in runs} == {"KnormPress", "TOVAPress"}
    for folder in runs.values():
        lines = (folder / "samples.jsonl").read_text().splitlines()
        assert len(lines) == 2
        for sample in map(json.loads, lines):
            # The question and the answer but for its last token stand beside the budget.
            assert {n for layer in sample["kept_tokens"] for n in layer} != {sample["prompt_tokens"]}
            assert sample["cache_bytes"] < sample["full_cache_bytes"]
