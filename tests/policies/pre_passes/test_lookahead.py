"""Lookahead queries, against kept sets of the original codes and a loop of transformers that reads like the paper."""

import numpy as np
import pytest
import torch
from golden import Case, cases, recorded_file
from kv_crafted import observed
from kv_models import prompt, tiny
from kv_runs import assert_alone, finish
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvbench import KVCache, make_policy
from kvbench.cache.attend import TorchBackend
from kvbench.cache.hook import prepare
from kvbench.cache.step import Step
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.generate import Generation, generate_tokens
from kvbench.engine.lookahead import _DraftCache, add_to_window
from kvbench.engine.sequence import Request, script_of
from kvbench.policies.observation import QueryWindow
from kvbench.policies.ranking import Ranking

LENGTH, BUDGET, TOKENS, WINDOW = 60, 20, 5, 4
IDS = torch.tensor([prompt(LENGTH)])
SMALL = {"tokens": TOKENS, "draft_window": 8, "scorer.window": WINDOW}


def sets(run: Generation) -> list[list[list[int]]]:
    """The positions of the prompt held by every layer and head."""
    assert isinstance(run.cache, KVCache)
    held = [layer.positions[0].tolist() for layer in run.cache.attention_layers]
    length = run.cache.sequence.budgets.prompt
    return [[sorted(p for p in head if 0 <= p < length) for head in layer] for layer in held]


# --- the original codes ----------------------------------------------------------------------------------------------
def kept(case: Case, official: bool) -> list[list[int]]:
    """The tokens that SnapKV's scorer keeps with a case's lookahead queries, by head."""
    window, ahead, tokens = case["window2"], case["lookahead"], case["T"]
    queries = case["queries"][:, case["window1"] - window :][None]
    places = torch.arange(tokens - window, tokens + ahead)[None] - ahead * official
    policy = make_policy("laqpp", case["budget"], kernel=case["kernel"], draft="full", **{"scorer.window": window})
    seen = observed(case["keys"][None], queries, scaling=case["D"] ** -0.5, budgets=(case["budget"],), packed=True)
    seen.window = QueryWindow(queries, places, ahead=ahead)
    found = policy.rank(seen, {}).select(case["budget"])
    return [head.nonzero().flatten().tolist() for head in found[0]]


def test_scores_of_lookahead_queries_keep_the_sets_of_the_original_code() -> None:
    for case in cases("lookahead.npz", "laq_"):
        assert kept(case, official=True) == case["kept"].sort().values.tolist(), case["name"]
        assert kept(case, official=False) == case["kept_true_positions"].sort().values.tolist(), case["name"]


def test_the_draft_of_speckv_keeps_the_sets_of_the_original_code() -> None:
    """The code feeds the last prompt token again: its sets are those of the tokens before, so ours have one more."""
    for case in cases("lookahead.npz", "spec_"):
        ahead, tokens, before = case["lookahead"], case["T"], case["window"] + 1
        how = {"aggregate": case["reduction"], "pool": {"mean": "avg"}.get(case["pool"], case["pool"])}
        more = {"kernel": case["kernel"], "scorer.window": before, **how}
        policy = make_policy("speckv", case["budget"] + 1, **more)
        keys, drafted = case["keys"][None, :, :tokens], case["keys"][None, :, tokens:]
        seen = observed(keys, case["queries"][None, :, :before], scaling=case["D"] ** -0.5, budgets=(case["budget"],))
        step = Step.__new__(Step)
        step._observation, step.params = seen, seen.params
        places = torch.arange(tokens - before, tokens)[None]
        seen.window = QueryWindow(case["queries"][None, :, :before], places)
        places = torch.arange(tokens, tokens + ahead)[None]
        add_to_window(step, case["queries"][None, :, before:], places, False, drafted)
        ranking = policy.rank(step.observation, {})
        found = ranking.scores[0, :, : tokens - before] / (1 if case["reduction"] == "max" else before + ahead)
        torch.testing.assert_close(found, case["pooled"], rtol=1e-4, atol=1e-6)
        kept = ranking.select(case["budget"] + 1)[0]
        expected = [[*sorted(head.tolist()), tokens - 1] for head in case["kept"]]
        assert [head.nonzero().flatten().tolist() for head in kept] == expected, case["name"]


def by_topk(ranking: Ranking, keep: Tensor | int) -> Tensor:
    """A selection that breaks the ties of max-pooling as torch.topk does, which the original code calls."""
    assert isinstance(keep, int)
    window = int(ranking.protected[0, 0].sum())
    chosen = ranking.scores[..., : ranking.scores.shape[-1] - window].topk(keep - window).indices
    return ranking.protected.scatter(-1, chosen, True)


def test_a_run_equals_the_original_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranking, "select", by_topk)
    with np.load(recorded_file("laq_model.npz")) as arrays:
        case = {name: torch.from_numpy(arrays[name]) for name in arrays.files if name != "meta"}
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=2, head_dim=8, eos_token_id=None, **shape))
    model.load_state_dict({n.removeprefix("model/"): x for n, x in case.items() if n.startswith("model/")})
    model.eval().set_attn_implementation("kvbench")
    fed: list[Tensor | None] = []
    hook = model.base_model.register_forward_hook(
        lambda _, args, kwargs, out: fed.append(kwargs.get("input_ids")), with_kwargs=True
    )
    policy = make_policy("laqpp", 32, draft_window=16, official=True)
    run = generate_tokens(model, case["ids"][None], policy, max_new_tokens=12)
    hook.remove()
    assert [int(ids) for ids in fed if ids is not None and ids.numel() == 1][:8] == case["lookahead"].tolist()
    assert run.tokens[0] == case["answer"].tolist()
    assert sets(run) == [case[f"kept/{layer}"].sort().values.tolist() for layer in range(2)]


# --- a loop of transformers ------------------------------------------------------------------------------------------
def pooled_attention(queries: Tensor, keys: Tensor, causal: bool) -> Tensor:
    """Attention [H_kv,T] of queries [H_q,n,D] to keys [H_kv,T,D], summed over queries, mean over groups, max-pooled."""
    group, tokens = len(queries) // len(keys), keys.shape[1]
    logits = queries @ keys.repeat_interleave(group, 0).mT / queries.shape[-1] ** 0.5
    if causal:  # the queries of the newest tokens
        at = torch.arange(tokens - queries.shape[1], tokens)[:, None]
        logits = logits.masked_fill(torch.arange(tokens) > at, -torch.inf)
    return logits.softmax(-1).sum(1).unflatten(0, (-1, group)).mean(1)


def best(scores: Tensor, budget: int, window: int) -> Tensor:
    """The tokens [H_kv,budget] to keep: the newest `window`, and the best others."""
    before = scores.shape[-1] - window
    pooled = F.max_pool1d(scores[None, :, :before], 7, 1, 3)[0]
    chosen = pooled.argsort(dim=-1, descending=True, stable=True)[:, : budget - window]
    return torch.cat([chosen, torch.arange(before, before + window).expand(len(scores), -1)], -1).sort(-1).values


@torch.inference_mode()
def paper(model: PreTrainedModel, draft: str, softmax: str = "prompt") -> list[list[list[int]]]:
    """Prefill, SnapKV, `TOKENS` greedy tokens from its cache, and the choice of tokens by their queries.

    softmax="all": by the largest attention of any query, over prompt and generated tokens.
    """
    queries: dict[int, list[Tensor]] = {}

    def recorded(module: torch.nn.Module, query: Tensor, *rest: Tensor, **more: object) -> object:
        queries.setdefault(int(module.layer_idx), []).append(query[0])
        return sdpa_attention_forward(module, query, *rest, **more)

    AttentionInterface.register("recorded", recorded)
    model.set_attn_implementation("recorded")
    cache = DynamicCache(config=model.config)
    logits = model(IDS, past_key_values=cache).logits
    prefilled = [(layer.keys[0].clone(), layer.values[0].clone()) for layer in cache.layers]
    for index, layer in enumerate(cache.layers):
        if draft == "evicted":
            stays = best(pooled_attention(queries[index][0][:, -8:], layer.keys[0], causal=True), BUDGET, 8)
            stays = stays[None, ..., None].expand(-1, -1, -1, layer.keys.shape[-1])
            layer.keys, layer.values = layer.keys.gather(2, stays), layer.values.gather(2, stays)
    for place in range(LENGTH, LENGTH + TOKENS):
        token = logits[:, -1:].argmax(-1)
        logits = model(token, position_ids=torch.tensor([[place]]), past_key_values=cache).logits
    found = []
    for index, (keys, _) in enumerate(prefilled):
        prefill, *ahead = queries[index]
        if softmax == "all":
            every, after = torch.cat([prefill[:, -WINDOW:], *ahead], 1), cache.layers[index].keys[0]
            logits = every @ after.repeat_interleave(len(every) // len(keys), 0).mT / every.shape[-1] ** 0.5
            later = torch.arange(after.shape[1]) > torch.arange(LENGTH - WINDOW, LENGTH + TOKENS)[:, None]
            largest = logits.masked_fill(later, -torch.inf).softmax(-1)[..., :LENGTH].amax(1)
            found.append(best(largest.unflatten(0, (len(keys), -1)).amax(1), BUDGET, WINDOW).tolist())
            continue
        scores = pooled_attention(prefill[:, -WINDOW:], keys, causal=True)
        scores = scores + pooled_attention(torch.cat(ahead, 1), keys, causal=False)
        found.append(best(scores, BUDGET, WINDOW).tolist())
    return found


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny(query_heads=4, kv_heads=2)


@pytest.mark.parametrize(
    ("slug", "draft", "softmax"),
    [("laqpp", "evicted", "prompt"), ("laqpp", "full", "prompt"), ("speckv", "full", "all")],
)
def test_kept_tokens_equal_the_loop_of_the_paper(model: PreTrainedModel, slug: str, draft: str, softmax: str) -> None:
    expected = paper(model, draft, softmax)
    model.set_attn_implementation("kvbench")
    run = generate_tokens(model, IDS, make_policy(slug, BUDGET, draft=draft, **SMALL), max_new_tokens=3)
    assert sets(run) == expected
    assert sets(run) != sets(
        generate_tokens(model, IDS, make_policy("snapkv", BUDGET, window=WINDOW), max_new_tokens=1)
    )


# --- costs, sharing, other scorers -----------------------------------------------------------------------------------
def test_variants_share_a_lookahead_and_pay_for_it(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchBackend, "workspace", 0)  # layers without a pre-pass would wait for each other
    model.set_attn_implementation("kvbench")
    calls: list[Tensor | None] = []
    policies = [make_policy("laqpp", b, draft=draft, **SMALL) for draft in ("evicted", "full") for b in (16, 24)]
    policies += [
        make_policy("lookahead_tova", 16, tokens=TOKENS, draft="full", draft_window=8),
        make_policy("snapkv", 16, window=4),
    ]
    flight = DecodeBatch(model)
    hook = model.base_model.register_forward_hook(
        lambda _, args, kwargs, out: calls.append(kwargs.get("input_ids")), with_kwargs=True
    )
    rows = flight.admit([Request(script_of(IDS), 3)], policies)[0]
    hook.remove()
    finish(flight)
    read = [ids for ids in calls if ids is not None]  # the head is asked for logits of hidden states
    assert len(read) == 1 + 3 * TOKENS  # two budgets evict for themselves, draft=full is the same for all
    for row in rows:
        assert_alone(model, row)
    visible = [16, 24, LENGTH, LENGTH, LENGTH]
    entries = [TOKENS * held + TOKENS * (TOKENS + 1) // 2 for held in visible]
    costs = [(r.cache.sequence.passed, r.cache.sequence.passes, r.cache.sequence.passed_entries) for r in rows]
    assert costs == [*((TOKENS, TOKENS, n) for n in entries), (0, 0, 0)]
    peaks = [r.cache.sequence.peak_nbytes for r in rows]
    assert peaks[2] - peaks[5] >= TOKENS * 2 * 2 * 2 * 8 * 8  # keys and values of 2 heads of 8 in 2 layers, float64


@pytest.mark.parametrize("base", ["tova", "kvec", "rkv", "defensivekv", "ada_snapkv", "critical_mass_snapkv"])
def test_every_scorer_with_a_window_uses_the_queries(model: PreTrainedModel, base: str) -> None:
    model.set_attn_implementation("kvbench")
    window = {} if base == "tova" else {"scorer.window": 4, **({"extended": 8} if base == "kvec" else {})}
    how = {"schedule": "prompt", "decode": "grow", **window}
    policy = make_policy(f"lookahead_{base}", BUDGET, draft="full", **how)
    ahead = generate_tokens(model, IDS, policy, max_new_tokens=1)
    alone = generate_tokens(model, IDS, make_policy(base, BUDGET, **how), max_new_tokens=1)
    assert sets(ahead) != sets(alone)


def test_eos_ends_a_lookahead_after_its_first_token(model: PreTrainedModel) -> None:
    model.set_attn_implementation("kvbench")
    policy = make_policy("laqpp", BUDGET, draft="full", **SMALL)
    answer = generate_tokens(model, IDS, make_policy("full"), max_new_tokens=TOKENS).tokens[0]
    for end in answer:
        model.generation_config.eos_token_id = [end]
        tokens = next((i for i in range(1, TOKENS) if answer[i] == end), TOKENS)
        assert generate_tokens(model, IDS, policy, max_new_tokens=1).cache.sequence.passed == tokens


def test_a_context_and_a_budget_of_the_draft_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one more"):
        make_policy("laq", 32)
    model = prepare(tiny())
    with pytest.raises(ValueError, match="without its question"):
        generate_tokens(model, IDS, make_policy("laq", 64), max_new_tokens=1, context_tokens=20)
    with pytest.raises(ValueError, match="at least one more"):
        generate_tokens(model, IDS, make_policy("laq", 0.5), max_new_tokens=1)


def test_tokens_over_a_stored_prompt_see_what_they_see_in_one_text_where_layers_share_keys() -> None:
    model = prepare(tiny("gemma3n", dtype=torch.float32))
    base, full, stored = model.model, make_policy("full"), LENGTH - 3
    held = KVCache(model.config, full)
    with torch.inference_mode():
        whole = base(input_ids=IDS, past_key_values=KVCache(model.config, full)).last_hidden_state
        base(input_ids=IDS[:, :stored], past_key_values=held)
        draft = _DraftCache.over(model.config, held.sequence)
        draft.visible, draft.queries = {one.index: one.store.positions for one in held.sequence.layers}, {}
        for place in range(stored, LENGTH):
            at = draft.follow(1, model.device)
            state = base(input_ids=IDS[:, [place]], position_ids=at, past_key_values=draft).last_hidden_state
            torch.testing.assert_close(state[:, 0], whole[:, place])
