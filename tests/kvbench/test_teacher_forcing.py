"""Teacher forcing: what is rated equals a plain forward pass, and what a cache fed token by token says."""

from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from kv_models import prompt, tiny
from kv_runs import kept_now
from torch import Tensor
from transformers import PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.prefill import prefill_prompts
from kvbench.engine.sequence import LiveSequence, Request, script_of
from kvbench.engine.teacher_forcing import score_pair, text_scores
from kvbench.models.tokens import Pair
from kvbench.policies.policy import Policy

BUDGET, BLOCK = 16, 6
IDS = torch.tensor([prompt(59)])
PROMPT, CONTINUATION = IDS[:, :37], IDS[:, 37:]
PAIR = Pair(PROMPT[0].tolist(), CONTINUATION[0].tolist())
SMALL: dict[str, Any] = {"window": 8}
PRESETS: dict[str, dict[str, Any]] = {
    "random": {},
    "h2o": {},
    "roco": {"recent": 4},
    "cam": {"m": 4},
    "ada_snapkv": SMALL,
    "caote_snapkv": SMALL,
    "cake": SMALL,
    "kvec": {"window": 8, "extended": 12},
    "d2o": {},
    "sirllm": {},
}
BLOCKWISE = [slug for slug in PRESETS if slug not in {"cake", "kvec", "d2o", "sirllm"}]


@cache
def model() -> PreTrainedModel:
    return prepare(tiny())


@cache
def plain(length: int = IDS.shape[1]) -> Tensor:
    """log p [T-1,V] of an ordinary forward pass of the same weights, without any cache."""
    eager = tiny()
    eager.set_attn_implementation("eager")
    with torch.inference_mode():
        return eager(IDS[:, :length], use_cache=False).logits[0, :-1].log_softmax(-1)


def picked(rows: Tensor, tokens: Tensor) -> Tensor:
    return rows.gather(-1, tokens[:, None])[:, 0]


def fed_one_by_one(policy: Policy, ids: Tensor, prompt_length: int, whole_prompt: bool) -> Tensor:
    """log p [T-1] of each token, the slow way: a forward call for each (but for a prompt), the next one looked up."""
    held = KVCache(model().config, policy, prompt_length=prompt_length)
    out = []
    first = prompt_length if whole_prompt else 1
    calls = [ids[:, :first], *ids[:, first:].split(1, dim=1)]
    at = 0
    with torch.inference_mode():
        for call in calls:
            logits = model()(call, past_key_values=held, use_cache=True).logits[0]
            for row in logits:
                at += 1
                if at < ids.shape[1]:
                    out.append(float(row.log_softmax(-1)[ids[0, at]]))
    return torch.tensor(out)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.double(), theirs.double(), atol=1e-4, rtol=0)


# continuations


@pytest.mark.parametrize(
    ("slug", "decode"),
    [
        *((slug, "evict") for slug in PRESETS if slug not in {"ada_snapkv", "kvec"}),
        *((slug, "grow") for slug in ("h2o", "ada_snapkv", "kvec", "d2o")),
    ],
)
def test_a_continuation_is_rated_as_by_a_cache_that_is_fed_token_by_token(slug: str, decode: str) -> None:
    policy = make_policy(slug, BUDGET, decode=decode, **PRESETS[slug])
    scored = score_pair(model(), PAIR, policy)
    with mock.patch("kvbench.engine.prefill.GIVEN_TOKENS", 1):
        single = score_pair(model(), PAIR, policy)
    close(scored.logprobs, single.logprobs)
    assert scored.greedy.tolist() == single.greedy.tolist()
    assert kept_now(scored.cache) == kept_now(single.cache)
    if policy.pre_pass is None:
        slow = fed_one_by_one(policy, IDS, PROMPT.shape[1], whole_prompt=True)
        close(single.logprobs, slow[PROMPT.shape[1] - 1 :])


@pytest.mark.parametrize("slug", ["kivi_g8_r8", "snapkv_kivi_g8_r8"])
def test_a_store_that_compresses_between_two_tokens_is_fed_one_by_one(slug: str) -> None:
    extra = SMALL if slug.startswith("snapkv") else {}
    policy = make_policy(slug, BUDGET, **extra)
    scored = score_pair(model(), PAIR, policy)
    close(scored.logprobs, fed_one_by_one(policy, IDS, PROMPT.shape[1], whole_prompt=True)[PROMPT.shape[1] - 1 :])
    full = picked(plain()[PROMPT.shape[1] - 1 :], CONTINUATION[0])
    assert not torch.allclose(scored.logprobs, full.float(), atol=1e-3)  # two bits do change something


def test_policies_that_score_one_continuation_together_score_it_as_each_alone() -> None:
    policies = [
        make_policy(slug, BUDGET, decode=decode, **(SMALL if slug == "snapkv" else {}))
        for slug, decode in [
            ("full", "grow"),
            ("snapkv", "grow"),
            ("h2o", "evict"),
            ("sirllm", "evict"),
            ("fp8", "grow"),
        ]
    ]
    request = Request(script_of(PROMPT, scored=CONTINUATION), CONTINUATION.shape[1])
    together = [LiveSequence(request, policy) for policy in policies]
    prefill_prompts(model(), [together])
    assert [one.sharing for one in together] == [len(policies)] * len(policies)
    for one in together:
        assert one.complete
        alone = score_pair(model(), PAIR, one.policy)
        close(one.scores.logprobs, alone.logprobs)
        assert one.scores.cache.kept_tokens().equal(alone.cache.kept_tokens())
        assert all(map(torch.equal, one.scores.most_kept.by_layer, alone.most_kept.by_layer))


# whole texts


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_models_of_every_family_are_rated_as_by_a_plain_forward_pass(family: str) -> None:
    """Sliding windows and soft caps, attention's and the logits', included."""
    eager, ours = tiny(family), tiny(family)
    eager.set_attn_implementation("eager")
    ours.set_attn_implementation("kvbench")
    with torch.inference_mode():
        rows = eager(IDS, use_cache=False).logits[0, :-1].log_softmax(-1)
    expected = picked(rows, IDS[0, 1:])
    whole = text_scores(ours, IDS, make_policy("full"))
    close(-whole.nll, expected)
    assert (whole.block, torch.cat(whole.most_kept.by_layer).unique().tolist()) == (None, [IDS.shape[1]])
    close(-text_scores(ours, IDS, make_policy("tova", 200, block=BLOCK)).nll, expected)
    scored = score_pair(ours, PAIR, make_policy("full"))
    close(scored.logprobs, expected[PROMPT.shape[1] - 1 :])


@pytest.mark.parametrize(("slug", "block"), [*((slug, BLOCK) for slug in BLOCKWISE), ("h2o", 1), ("ada_snapkv", 1)])
def test_every_token_is_rated_once_as_by_a_cache_that_is_fed_token_by_token(slug: str, block: int) -> None:
    policy = make_policy(slug, BUDGET, block=block, **PRESETS[slug])
    scored = text_scores(model(), IDS, policy)
    close(-scored.nll, fed_one_by_one(policy, IDS, IDS.shape[1], whole_prompt=False))
    assert len(scored.nll) == IDS.shape[1] - 1
    assert scored.block == block
    mean = torch.cat(scored.most_kept.by_layer).float().mean() if policy.allocator.exact else None
    assert scored.cache.kept_tokens().sum() <= BUDGET * 2 * 2
    assert mean is None or policy.allocator.per_head or mean == BUDGET + block


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (make_policy("h2o", BUDGET), "evicts only once the whole text is in .* block"),
        (make_policy("sirllm", BUDGET), "prompt_tokens"),
        (make_policy("gemfilter", BUDGET, layer=1), "rewrites a whole prompt.*prompt_tokens"),
        (make_policy("kivi_g8_r8", BUDGET), "final form only once it is a whole prompt.*prompt_tokens"),
        (make_policy("tova", BUDGET, block=4, order="evict_then_attend"), "evicts a block before it is scored"),
    ],
    ids=lambda x: x.name if isinstance(x, Policy) else "",
)
def test_a_policy_that_would_evict_nothing_while_a_text_is_read_is_refused(policy: Policy, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        text_scores(model(), IDS, policy)


@pytest.mark.parametrize(
    ("slug", "fields"),
    [
        ("paged_snapkv", {**SMALL, "unit": "token", "heads": "model", "every": 3, "decode": "evict"}),
        ("cake", {**SMALL, "late": True}),
        ("global_h2o", {"late": True, "decode": "evict"}),
    ],
)
def test_layers_that_evict_together_do_so_after_each_scored_token(slug: str, fields: dict[str, Any]) -> None:
    """As after tokens that are generated: those of the first run are scored by the second."""
    policy, flight = make_policy(slug, 20, **fields), DecodeBatch(model())
    ((wrote,),) = flight.admit([Request(script_of(PROMPT), 12)], [policy])
    while flight.in_flight:
        flight.step()
    given = Request(script_of(PROMPT, scored=torch.tensor([wrote.tokens])), 0)
    ((scored,),) = DecodeBatch(model()).admit([given], [policy])
    assert (wrote.error, scored.error) == (None, None)
    assert wrote.cache is not None
    assert scored.cache is not None
    assert kept_now(scored.cache) == kept_now(wrote.cache)
