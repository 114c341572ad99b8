"""Presses of an installed kvpress under our prompts, samples and tables."""

import copy
import json
import sys
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kv_hybrids import tiny_hybrid
from kv_models import prompt
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvbench
from kvbench import BudgetError, KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.cli import main
from kvbench.engine.generate import generate_tokens
from kvbench.errors import ConfigError, UsageError
from kvbench.policies.pre_passes.gemfilter import GemFilter
from kvbench.policies.press import KVPress
from kvbench.policies.schedule import Prompt
from kvbench.report.table import results_table

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


def by_hand(
    model: PreTrainedModel, ids: Tensor, press: Any, question: int, new: int = NEW, decoding: bool = False
) -> list[int]:
    """The tokens of kvpress's own pipeline: the press while the context is read, then question and answer after it.

    decoding: the press is active afterwards instead, and the question comes in one call.
    """
    model = copy.deepcopy(model)
    model.set_attn_implementation("sdpa")
    cache, tokens = DynamicCache(), ids.shape[1] - question

    def after(new: Tensor, place: int) -> Tensor:
        where = torch.arange(place, place + new.shape[1])
        out = model(new, past_key_values=cache, position_ids=where[None], cache_position=where)
        return out.logits[:, -1].argmax(-1)[None]

    with torch.inference_mode():
        with nullcontext() if decoding and isinstance(press, kvpress.DecodingPress) else press(model):
            token = after(ids[:, :tokens], 0)
        with press(model) if decoding else nullcontext():
            place = tokens
            for part in (ids[:, tokens:],) if decoding and question else ids[0, tokens:, None, None]:
                token, place = after(part, place), place + part.shape[1]
            found = [int(token)]
            for place in range(ids.shape[1], ids.shape[1] + new - 1):
                token = after(token, place)
                found.append(int(token))
    return found


@pytest.mark.parametrize("question", [0, 5])
@pytest.mark.parametrize(
    "name", ["SnapKVPress", "KnormPress", "TOVAPress", "PyramidKVPress", "AdaKVPress", "KeyDiffPress"]
)
def test_a_press_generates_the_text_of_kvpress_pipeline(model: PreTrainedModel, name: str, question: int) -> None:
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
    assert got.cache.held_nbytes == 2 * sum(layer.keys.nbytes for layer in got.cache.layers)
    assert got.cache.peak_nbytes > got.cache.held_nbytes


def test_a_press_with_a_threshold_has_no_budget_and_counts_masked_tokens(model: PreTrainedModel) -> None:
    press = kvpress.DMSPress(press=kvpress.KnormPress(), threshold=-3.0, sliding_window_size=20)
    ours = make_policy("kvpress", 20, press=press)
    assert ours.budget is None
    got = generate_tokens(model, ids_of(61), ours, max_new_tokens=NEW)
    assert got.cache.kept_tokens().unique().tolist() == [61 + NEW - 1], "masked tokens are held"
    assert got.tokens[0] == by_hand(model, ids_of(61), press, 0)
    masked = [round(share * 2 * 61) for share in press.compression_ratios.values()]  # as kvpress counts them
    assert min(masked) > 0
    assert [sum(heads) for heads in got.cache.masked] == masked
    with pytest.raises(ConfigError, match=r"press.threshold must be a score below which DMSPress evicts a token"):
        make_policy("kvpress", 20, press=kvpress.DMSPress(press=kvpress.KnormPress()))


DECODING = {"compression_interval": 8, "hidden_states_buffer_size": 4}


def test_a_press_that_compresses_while_decoding_returns_to_the_budget_as_in_kvpress_s_pipeline(
    model: PreTrainedModel,
) -> None:
    """A question of 12 tokens is one call: 64 + 12 tokens are held after it, and 48 after every 8th call."""
    ids, how = ids_of(76), {"max_new_tokens": 20, "context_tokens": 64}
    ours = make_policy("kvpress", 48, press=kvpress.DecodingPress(kvpress.KnormPress(), **DECODING))
    first = generate_tokens(model, ids, ours, max_new_tokens=1, context_tokens=64)
    assert first.cache.kept_tokens().unique().tolist() == [76]
    got = generate_tokens(model, ids, ours, **how)
    theirs = kvpress.DecodingPress(kvpress.KnormPress(), target_size=48, **DECODING)
    assert got.tokens[0] == by_hand(model, ids, theirs, 12, new=20, decoding=True)
    assert got.cache.kept_tokens().unique().tolist() == [48 + 4], "20 calls"
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in got.cache.layers)
    assert got.cache.held_nbytes - kept == 2 * 4 * 32 * 8, "the hidden states of four tokens, in two layers"
    # Call 5 begins with the hidden states of 4 calls, the question among them; layer 0 has its new token, layer 1 not.
    assert got.cache.peak_nbytes == (80 + 79) * 2 * 2 * 8 * 8 + 2 * (12 + 3) * 32 * 8
    share = make_policy("kvpress", 0.5, press=kvpress.DecodingPress(kvpress.KnormPress(), **DECODING))
    assert generate_tokens(model, ids, share, **how).cache.kept_tokens().unique().tolist() == [32 + 4]


def test_a_press_for_prefill_and_decoding_keeps_the_budget_in_both(model: PreTrainedModel) -> None:
    def made(target: int = 2048) -> Any:
        decoder = kvpress.DecodingPress(kvpress.KnormPress(), target_size=target, **DECODING)
        return kvpress.PrefillDecodingPress(kvpress.KnormPress(), decoder)

    got = [
        generate_tokens(model, ids_of(60), make_policy("kvpress", 30, press=made()), max_new_tokens=new)
        for new in (1, 18)
    ]
    assert [run.cache.kept_tokens().unique().tolist() for run in got] == [[30], [30 + 1]]  # 17 calls
    theirs = made(30)
    theirs.prefilling_press.compression_ratio = 1 - 30.5 / 60
    assert got[1].tokens[0] == by_hand(model, ids_of(60), theirs, 0, new=18, decoding=True)


def test_decoding_presses_that_keep_no_promise_are_refused(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    masking = kvpress.DecodingPress(kvpress.AdaKVPress(kvpress.KnormPress()))
    with pytest.raises(ConfigError, match=r"press.base_press=AdaKVPress masks keys, and DecodingPress shows keys"):
        make_policy("kvpress", 48, press=masking)
    assert make_policy("kvpress", press=kvpress.DecodingPress(kvpress.KnormPress(), target_size=33)).budget == 33
    broken = kvpress.DecodingPress(kvpress.KnormPress(), **DECODING)
    monkeypatch.setattr(
        kvpress.KnormPress, "compress", lambda press, module, hidden, keys, values, *rest: (keys, values)
    )
    with pytest.raises(BudgetError, match="DecodingPress holds 79 tokens per KV head, but its target size is 48"):
        generate_tokens(model, ids_of(64), make_policy("kvpress", 48, press=broken), max_new_tokens=16)


def test_a_press_whose_weights_cannot_be_loaded_is_one_message(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=r"KVzapPress of kvpress needs files that cannot be loaded: .*KVzap"):
        generate_tokens(model, ids_of(40), policy("KVzapPress", 20), max_new_tokens=1)


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


def test_unsupported_uses_of_a_press_are_refused_with_one_message(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="kvpress compresses a cache of its own, not a KVCache, so it can only"):
        KVCache(model.config, policy("KnormPress", 20))
    with pytest.raises(ConfigError, match="a press compresses the whole prompt once, then the cache grows"):
        make_policy("kvpress", 20, press="KnormPress", schedule="blocks")
    with pytest.raises(ValueError, match="cannot be combined with a scorer, value, reader, pre-pass or store"):
        KVPress(press="KnormPress", schedule=Prompt(decode="grow"), pre_pass=GemFilter(layer=1))
    with pytest.raises(ConfigError, match=r"press=KnormPres is not in kvpress .* did you mean KnormPress"):
        make_policy("kvpress", 20, press="KnormPres")
    with pytest.raises(ConfigError, match="press=null must name a press of kvpress, such as policy=kvpress/"):
        make_policy("kvpress", 20)
    with pytest.raises(UsageError, match=r"SnapKVPress of kvpress cannot compress this prompt: .*window"):
        generate_tokens(model, ids_of(20), make_policy("kvpress", 8, press="SnapKVPress"), max_new_tokens=1)
    with pytest.raises(UsageError, match="has recurrent layers: use a policy of kvbench's own"):
        generate_tokens(prepare(tiny_hybrid("lfm2")), ids_of(20), policy("KnormPress", 8), max_new_tokens=1)


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
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "one two three " * 200}))
    scores = ["task=perplexity", f"task.data_dir={tmp_path / 'texts.jsonl'}", "task.length=99", "task.prompt_tokens=50"]
    assert main(["policy=kvpress/KnormPress", "budget=64", *scores, f"out={tmp_path}"]) == 1
    assert "task perplexity: kvpress/KnormPress can only generate" in capsys.readouterr().err
    for folder in runs.values():
        lines = (folder / "samples.jsonl").read_text().splitlines()
        assert len(lines) == 2
        for sample in map(json.loads, lines):
            # The question and the answer but for its last token stand beside the budget.
            assert {n for layer in sample["kept_tokens"] for n in layer} != {sample["prompt_tokens"]}
            assert sample["cache_bytes"] < sample["full_cache_bytes"]


def test_a_table_shows_the_size_without_masked_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["policy=kvpress/AdaKVPress", "policy.press.press._target_=kvpress.KnormPress", "budget=64", "task=niah"]
    main([*line, "task.lengths=[256]", "limit=1", f"out={tmp_path}"])
    assert "if freed" in capsys.readouterr().out
    (samples,) = tmp_path.glob("*/samples.jsonl")
    sample = json.loads(samples.read_text())
    for kept, masked in zip(sample["kept_tokens"], sample["masked_tokens"], strict=True):
        assert sum(masked) == len(masked) * (sample["prompt_tokens"] - 64)
        assert min(kept) == max(kept) >= sample["prompt_tokens"]


def test_shares_count_positions_on_both_sides_or_neither_and_a_decoding_press_has_its_own_footnote(
    model: PreTrainedModel,
) -> None:
    """Without eviction, each number takes what its codes take: no policy is charged for positions it does not store."""

    def rows(*policies: Any, budget: float) -> Any:
        how = {"task.lengths": [200], "task.max_new_tokens": 12}
        return kvbench.evaluate("pocket", policies=policies, budgets=[budget], tasks=["niah"], limit=1, **how)

    shares = [row.cache_share for row in rows("full", "snapkv", "fp8", "snapkv_fp8", "kvpress/KnormPress", budget=4000)]
    assert shares == pytest.approx([1, 1, 0.25, 0.25, 1], abs=2e-4), "and a few bytes of scales"
    evicting, press = rows("snapkv_fp8", "kvpress/KnormPress", budget=64)
    assert evicting.full_position_bytes > press.full_position_bytes == 0
    decoder = kvpress.DecodingPress(kvpress.KnormPress(), **DECODING)
    decodes = kvpress.DecodingPress(kvpress.KnormPress(), **DECODING)
    both = kvpress.PrefillDecodingPress(kvpress.KnormPress(0.5), decodes)
    decoding, twice = (rows(make_policy("kvpress", 48, press=press), budget=48)[0] for press in (decoder, both))
    assert [press.when, decoding.when, twice.when] == ["whole prompt, grow", "decoding, press", "whole prompt, press"]
    for row in (decoding, twice):
        notes = " ".join(results_table([row]).notes)
        assert "all decoded tokens kept" not in notes
        assert "decoded tokens evicted by the press" in notes
