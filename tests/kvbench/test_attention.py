"""The attention function: what it computes, and what it refuses rather than ignores."""

from functools import cache
from typing import Any, Literal

import pytest
import torch
from kv_crafted import Crafted, drawn
from kv_models import SLIDING, prompt, tiny
from torch import Tensor

from kvbench import KVCache, make_policy
from kvbench.cache import attention
from kvbench.cache.hook import kvbench_attention, prepare
from kvbench.policies.observation import Observation

ATTEND_AND_SUM = attention.attend_and_sum


@cache
def model(family: str = "llama", dtype: torch.dtype = torch.float64) -> Any:
    return prepare(tiny(family, dtype=dtype))


def logits(running: Any, ids: list[int], calls: list[int], **kwargs: Any) -> Tensor:
    """Logits of all tokens, taken in by calls of the given sizes with one cache."""
    out, start = [], 0
    for size in calls:
        here = torch.tensor([ids[start : start + size]])
        out.append(running(here, **kwargs).logits)
        start += size
    assert start == len(ids)
    return torch.cat(out, dim=1)[0]


@pytest.mark.parametrize("calls", [[SLIDING + 1, 35], [50, 1, 1, 8]])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2"])
def test_logits_equal_those_of_eager_attention_however_the_tokens_come(family: str, calls: list[int]) -> None:
    """60 tokens: beyond the sliding window of Mistral and Gemma2; Gemma2 has soft caps and a scaling of its own."""
    assert SLIDING < 60
    ids, running = prompt(60), model(family, torch.float32)
    held = KVCache(running.config, make_policy("full"))
    with torch.no_grad():
        got = logits(running, ids, calls, past_key_values=held)
        running.set_attn_implementation("eager")
        expected = logits(running, ids, [60])
        running.set_attn_implementation("kvbench")
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("calls", [[60], [40, 1, 1, 18]])
@pytest.mark.parametrize(("slug", "family"), [("h2o", "llama"), ("roco", "gemma2")])
def test_attention_out_of_summed_rows_equals_that_of_the_full_cache(family: str, slug: str, calls: list[int]) -> None:
    ids, running = prompt(60), model(family)
    held = KVCache(running.config, make_policy(slug, 60, schedule="prompt"), prompt_length=60)  # nothing is evicted
    summed = []

    def noted(seen: Observation, statistic: Literal["column_sums", "moments"]) -> Tensor | None:
        summed.append(ATTEND_AND_SUM(seen, statistic))
        return summed[-1]

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "attend_and_sum", noted)
        got = logits(running, ids, calls, past_key_values=held)
        expected = logits(running, ids, [60], past_key_values=KVCache(running.config, make_policy("full")))
    assert any(out is not None for out in summed)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("slug", "fields"), [("h2o", {}), ("roco", {}), ("snapkv", {"window": 6})])
def test_gradients_flow_through_attention_with_every_policy(slug: str, fields: dict[str, Any]) -> None:
    running, ids = model(), torch.tensor([prompt(40)])
    got, expected = [], []
    evicting = make_policy(slug, 16, schedule="prompt", **fields)
    for policy, gradients in ((evicting, got), (make_policy("full"), expected)):
        running.zero_grad()
        running(ids, past_key_values=KVCache(running.config, policy, prompt_length=40)).logits.square().sum().backward()
        gradients.extend(parameter.grad.clone() for parameter in running.parameters())
    running.zero_grad()
    torch.testing.assert_close(got, expected)


def test_a_query_that_sees_no_survivor_sees_itself() -> None:
    """Tokens 3 and 4 survive: queries 0 to 2 see neither, query 3 sees one, query 4 both."""
    queries, keys, values = drawn(5, 2, 1)
    layer = Crafted(make_policy("local_window", 2, order="evict_then_attend"), 2, 1)
    out = layer.call(queries, keys, values)
    last = (queries[:, :, 4:] @ keys[:, :, 3:].mT).softmax(-1) @ values[:, :, 3:]
    torch.testing.assert_close(out, torch.cat([values[:, :, :4].expand(-1, 2, -1, -1), last], dim=2))


# refusals: one sentence each


def call(module: Any, held: KVCache, mask: Tensor | None = None, **kwargs: Any) -> None:
    """One call of the attention function as a model would make it."""
    queries, keys, values = (x.float() for x in drawn(5, 4, 2))
    layer, _ = held.update(keys, values, 0)
    kvbench_attention(module, queries, layer, layer, mask, scaling=1.0, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"sinks": torch.zeros(4)}, "LlamaAttention passes sinks to its attention, which kvbench does not support"),
        ({"dropout": 0.1}, r"LlamaAttention asks for attention dropout 0.1: call model.eval\(\) before generating"),
        ({"mask": torch.zeros(1, 1, 5, 5)}, "a 4D attention mask cannot follow evictions"),
        ({"is_causal": False}, "LlamaAttention uses attention that is not causal"),
        ({"position_bias": torch.zeros(1, 4, 5, 5)}, "LlamaAttention passes position_bias to its attention"),
        ({"max_length_q": 3}, "LlamaAttention passes max_length_q to its attention"),
        ({"block_size": 2, "chunk": 4}, "LlamaAttention passes block_size, chunk to its attention"),
        ({"softmax": "entmax"}, "LlamaAttention passes softmax to its attention"),
        ({"of_a_later_release": torch.zeros(1)}, "LlamaAttention passes of_a_later_release to its attention"),
    ],
)
def test_what_would_change_attention_is_refused(kwargs: dict[str, Any], sentence: str) -> None:
    running = model()
    attention = running.model.layers[0].self_attn
    with pytest.raises(ValueError, match=sentence):
        call(attention, KVCache(running.config, make_policy("full")), **kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"output_of_a_later_release": True, "return_something": True},
        {"of_a_later_release": True},  # a switch whose name is not about attention
        {"router_aux_loss_coef": 0.001, "labels": torch.ones(5)},
        {"use_sinks": False, "position_bias": None, "position_ids": torch.arange(5), "s_aux": None},
    ],
)
def test_what_is_about_outputs_routing_and_training_passes_however_new(kwargs: dict[str, Any]) -> None:
    running = model()
    held = KVCache(running.config, make_policy("full"))
    call(running.model.layers[0].self_attn, held, **kwargs)
    assert held.seen == 5


def test_another_attention_cannot_read_the_cache() -> None:
    running: Any = tiny()
    running.set_attn_implementation("sdpa")
    held = KVCache(running.config, make_policy("full"))
    with pytest.raises(ValueError, match=r"attn_implementation='sdpa'.*set_attn_implementation\(\"kvbench\"\) first"):
        running(torch.tensor([prompt(5)]), past_key_values=held)


@pytest.mark.parametrize("generates", [True, False])
def test_a_cache_that_holds_a_text_says_so_to_the_next(generates: bool) -> None:
    running, ids = model(), torch.tensor([prompt(40)])
    held = KVCache(running.config, make_policy("snapkv", 36))
    running.generate(ids, past_key_values=held, max_new_tokens=2)
    again = {"max_new_tokens": 2} if generates else {"position_ids": torch.arange(40)[None]}
    with pytest.raises(
        ValueError, match=r"already holds 4\d tokens: make a new one, or call reset\(\), for another text"
    ):
        (running.generate if generates else running)(ids, past_key_values=held, **again)
    held.reset()
    running.generate(ids, past_key_values=held, max_new_tokens=2)


KEPT, PROMPT = 36, 40
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"attention_mask": torch.ones(1, PROMPT)}, "attention_mask has 40 columns, but the cache has seen 40 tokens"),
    ({"attention_mask": torch.ones(1, KEPT + 1)}, "attention_mask has 37 columns"),
    ({"attention_mask": torch.ones(1, 1)}, "attention_mask has 1 column,"),
    ({"attention_mask": torch.ones(1, PROMPT + 4)}, "pass a mask with 41 columns, or none without padding"),
    ({"attention_mask": torch.tensor([[0] * 5 + [1] * 36])}, "marks 35 earlier tokens of sequence 0, but .* seen 40"),
    ({"position_ids": torch.tensor([[KEPT]])}, "position_ids of sequence 0 do not continue .* got 36 where 40 follows"),
    ({"position_ids": torch.tensor([[0]])}, "got 0 where 40 follows"),
    ({"position_ids": torch.tensor([[PROMPT + 1]])}, "got 41 where 40 follows"),
]


@pytest.mark.parametrize("slug", ["full", "snapkv", "h2o_fp8"])
def test_masks_and_positions_that_contradict_the_cache_are_refused(slug: str) -> None:
    """The right ones give the text of the whole ids."""
    ids, policy = torch.tensor([prompt(PROMPT)]), make_policy(slug, None if slug == "full" else KEPT)

    def opened() -> tuple[KVCache, Tensor]:
        held = KVCache(model().config, policy)
        return held, model()(ids, past_key_values=held).logits[:, -1:].argmax(-1)

    text = model().generate(ids, past_key_values=KVCache(model().config, policy), max_new_tokens=5)[:, PROMPT:]
    for given, sentence in CONTRADICTIONS:
        held, token = opened()
        with pytest.raises(ValueError, match=sentence):
            model()(token, past_key_values=held, **given)
    for given in ({"attention_mask": torch.ones(1, PROMPT)}, {"attention_mask": torch.ones(1, KEPT + 1)}, {}):
        held, token = opened()
        with pytest.raises(ValueError, match=r"do not continue those of|no token that the cache has"):
            model().generate(token, past_key_values=held, max_new_tokens=4, **given)
    held, token = opened()
    got = model().generate(token, past_key_values=held, max_new_tokens=4, attention_mask=torch.ones(1, PROMPT + 1))
    assert torch.equal(got, text)
    for given in ({}, {"attention_mask": torch.ones(1, PROMPT + 1)}, {"position_ids": torch.tensor([[PROMPT]])}):
        held, token = opened()
        assert model()(token, past_key_values=held, **given).logits[0, -1].argmax() == text[0, 1]


def test_rows_keep_their_number_their_padding_and_their_positions() -> None:
    ids, mask = torch.tensor([[0, 0, *prompt(5)], prompt(7)]), torch.tensor([[0, 0] + [1] * 5, [1] * 7])
    for places in (None, (mask.cumsum(-1) - 1).clamp(min=0)):  # models count padding unless they are told positions
        held = KVCache(model().config, make_policy("full"))
        model()(ids, attention_mask=mask, past_key_values=held, position_ids=places)
        more = torch.ones(2, 1, dtype=torch.long)
        with pytest.raises(ValueError, match="has 2 sequences, but the call brings 1"):
            model()(more[:1], past_key_values=held)
        with pytest.raises(ValueError, match="marks 7 earlier tokens of sequence 0, but the cache has seen 5"):
            model()(more, past_key_values=held, attention_mask=torch.ones(2, 8), position_ids=None)
        own = mask.sum(-1, keepdim=True) if places is not None else 7 * more
        with pytest.raises(ValueError, match="position_ids of sequence 0 do not continue"):
            model()(more, past_key_values=held, position_ids=own - torch.tensor([[2], [0]]))
        model()(more, past_key_values=held, attention_mask=torch.cat([mask, more], 1), position_ids=own)
        assert held.kept_tokens()[0].tolist() == [[6, 6], [8, 8]]


def test_attention_weights_are_refused() -> None:
    held = KVCache(model().config, make_policy("full"))
    with pytest.raises(ValueError, match="output_attentions=True is not supported"):
        model().generate(torch.tensor([prompt(5)]), past_key_values=held, max_new_tokens=2, output_attentions=True)
