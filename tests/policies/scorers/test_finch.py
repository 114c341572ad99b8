"""FINCH: the question's queries weighted by what they see, chunks of the context, and kept keys without gaps."""

from dataclasses import replace

import pytest
import torch
from kv_crafted import observed
from kv_models import prompt, rotated
from kv_runs import kept_now
from kvpress_kept import FAMILIES, policy_keeps, press_keeps, presses, small
from transformers import PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.engine.generate import generate_tokens
from kvbench.policies.scorers.finch import Finch
from kvbench.policies.selections.shares import Shares

LENGTH, QUESTION, BUDGET = 70, 62, 24
IDS = torch.tensor([prompt(LENGTH)])


def test_a_query_counts_by_the_tokens_it_sees() -> None:
    """Two queries at positions 2 and 3: attention (1/4, 1/2, 1/4, 0) times 3 and (1/2, 0, 0, 1/2) times 4, halved."""
    rows = torch.tensor([[[[[0.25, 0.5, 0.25, 0.0], [0.5, 0.0, 0.0, 0.5]]]]])
    keys = torch.zeros(1, 1, 4, 8)
    window = {"recent_queries": keys[:, :, 2:], "recent_positions": torch.tensor([[2, 3]])}
    seen = observed(keys, prompts=(4,), questions=(2,), known={("rows", 2): rows}, **window)
    expected = torch.tensor([[[0.75 + 2, 1.5, 0.75, 2.0]]]) / 2
    before = torch.tensor([[[0.5 + 1.5, 1.0, 0.5, 1.5]]]) / 2
    for window in ("question", 2):
        for official, scores in ((False, expected), (True, before)):
            finch, state = Finch(window, official), {"question_attention": torch.zeros(1, 1, 4, 1)}
            finch.observe(seen, state)
            torch.testing.assert_close(finch.score(seen, state), scores)


def test_kept_keys_stand_without_gaps_up_to_the_newest_token(model: PreTrainedModel) -> None:
    cache = KVCache(model.config, make_policy("finch", 20), question=44)
    with torch.inference_mode():
        model(torch.tensor([prompt(50)]), past_key_values=cache)
    for layer in cache.layers:
        places = layer.positions + layer.states[0].store.state["moved"][..., 0]
        assert places[0].tolist() == [[float(place) for place in range(30, 50)]] * 2


@pytest.mark.parametrize("chunk", [None, 24])
def test_kept_tokens_equal_kvpress_after_its_delimiter(chunk: int | None) -> None:
    ids = prompt(72)
    delimiter = next(token for token in range(100) if token not in ids)
    press = presses().FinchPress(rerotate_keys=False, chunk_length=chunk)  # moved keys would not be found again
    press.delimiter_token_id, press.compression_ratio = delimiter, 1 - 24.5 / 72  # 8 of each 24
    policy = make_policy("finch", 24, official=True)
    policy = policy if chunk is None else replace(policy, selection=Shares(chunk))
    for family in FAMILIES:
        running = small(family)
        theirs = press_keeps(running, ids, press, [*ids[:66], delimiter, *ids[66:]])
        assert press.window_size == 6
        assert policy_keeps(running, ids, policy, question=66) == theirs, family


# --- chunk by chunk ---------------------------------------------------------------------------------------------------
@torch.inference_mode()
def first_layer(model: PreTrainedModel, chunk: int, layer_wide: bool) -> list[tuple[int, ...]]:
    """What each KV head of layer 0, whose input no eviction changes, keeps: the paper's steps, vector by vector.

    layer_wide: the scores of all heads are one sum, as in the authors' code.
    """
    layer = model.model.layers[0]
    given = layer.input_layernorm(model.model.embed_tokens(IDS))
    attention, dim = layer.self_attn, layer.self_attn.head_dim
    keys, queries = (project(given)[0].unflatten(-1, (-1, dim)) for project in (attention.k_proj, attention.q_proj))
    kept: list[list[int]] = [[] for _ in range(keys.shape[1])]
    for begin in range(0, LENGTH, chunk):
        end = min(begin + chunk, LENGTH)
        asking = range(QUESTION, LENGTH)
        found = []
        for head, own in enumerate(kept):
            held = [*own, *range(begin, end)]
            read = [*held, *range(max(end, QUESTION), LENGTH)]  # the question stands behind the chunk, or in it
            stored = torch.stack([rotated(keys[token, head], place) for place, token in enumerate(read)])
            scores = torch.zeros(len(held), dtype=keys.dtype)
            group = queries.shape[1] // keys.shape[1]
            for token in (token for token in read if token in asking):
                place = read.index(token)
                for query_head in range(head * group, (head + 1) * group):
                    query = rotated(queries[token, query_head], place)
                    weights = (stored[: place + 1] @ query * dim**-0.5).softmax(0)
                    seen = min(len(held), place + 1)
                    scores[:seen] += (place + 1) * weights[:seen]
            scores[[slot for slot, token in enumerate(held) if token in asking]] = torch.inf
            found.append(scores)
        for head, own in enumerate(kept):
            scores = torch.stack(found).sum(0) if layer_wide else found[head]
            best = scores.argsort(descending=True)[: BUDGET * end // LENGTH].tolist()
            kept[head] = sorted([*own, *range(begin, end)][slot] for slot in best)
    return [tuple(own) for own in kept]


@pytest.mark.parametrize(("chunk", "passed"), [(16, 3 * 8 + 6), (31, 2 * 8), (70, 0)])
def test_chunks_are_judged_by_the_question_as_in_the_paper(model: PreTrainedModel, chunk: int, passed: int) -> None:
    """Blocks end before the question, inside it and behind it; its tokens to come are read once more for each.

    granularity=layer: one set for all heads of a layer, as in the authors' code.
    """
    for granularity in ("kv_head", "layer"):
        policy = make_policy("finch_chunks", BUDGET, block=chunk, granularity=granularity)
        done = generate_tokens(model, IDS, policy, max_new_tokens=1, question=QUESTION)
        assert kept_now(done.cache)[0][0] == first_layer(model, chunk, granularity == "layer"), granularity
        assert done.cache.sequence.passed == passed


# --- refusals ---------------------------------------------------------------------------------------------------------
def test_what_has_no_question_is_refused(model: PreTrainedModel) -> None:
    for how, sentence in (
        ({}, "finch needs the position of the question in the prompt: pass question="),
        ({"question": LENGTH}, "question must be a position in its prompt, 0 to 69 here, got 70"),
        ({"question": [1, 2]}, "question has 2 positions, but the batch has 1 sequence"),
        ({"question": 40}, "finch keeps the question, here 30 tokens, but has 24 tokens per KV head: use a larger"),
        (
            {"context_tokens": QUESTION},
            "finch compresses a context by its question, which is not known with compress=context",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            generate_tokens(model, IDS, make_policy("finch", BUDGET), max_new_tokens=1, **how)
