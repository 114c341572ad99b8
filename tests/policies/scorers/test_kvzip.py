"""KVzip: the passes it asks for, and the sets that kvpress keeps."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_models import CodePoints, prompt, tiny
from kv_runs import kept_now
from kvpress_kept import kvzip_press_keeps
from transformers import PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.engine.generate import generate_tokens
from kvbench.policies.observation import SequenceInfo
from kvbench.policies.pre_passes.repetition import Repetition
from kvbench.policies.scorers.kvzip import KVzip

LENGTH, BUDGET, CHUNK, SINKS = 50, 20, 24, 4
IDS = prompt(LENGTH)
WORDS = CodePoints()


def pass_tokens(start: int) -> list[int]:
    """The request, the end of the turn, the chunk."""
    if start == 0:
        return [*WORDS.encode("\n\nRepeat the previous context exactly."), *WORDS.encode("\n"), *IDS[:CHUNK]]
    request = WORDS.encode("\n\nRepeat the part of the previous context exactly, starting with")
    return [*request, *IDS[start - 8 : start], *WORDS.encode("\n"), *IDS[start : start + CHUNK]]


def compressed(model: PreTrainedModel, slug: str, ids: list[int] = IDS, **fields: Any) -> KVCache:
    model.set_attn_implementation("kvbench")
    policy = make_policy(slug, BUDGET, chunk=CHUNK, **fields)
    return generate_tokens(model, torch.tensor([ids]), policy, max_new_tokens=1, encoder=WORDS).cache


def test_a_pass_asks_for_a_chunk_behind_the_tokens_before_it() -> None:
    found = Repetition(CHUNK).passes(IDS, WORDS)
    assert [one.about for one in found] == [range(24), range(24, 48), range(48, 50)]
    assert [one.tokens for one in found] == [pass_tokens(start) for start in (0, 24, 48)]


def test_a_decoded_token_stays_where_decoding_evicts() -> None:
    """It is in no repetition, and what a repetition looked at least goes first."""
    model = prepare(tiny())
    policy = make_policy("kvzip", BUDGET, chunk=CHUNK, decode="evict")
    before, after = (
        kept_now(generate_tokens(model, torch.tensor([IDS]), policy, max_new_tokens=new, encoder=WORDS).cache)[0]
        for new in (1, 6)
    )
    for old, new in zip((h for x in before for h in x), (h for x in after for h in x), strict=True):
        assert len(new) == len(old)
        assert set(range(LENGTH, LENGTH + 5)) <= set(new) or len(old) < SINKS + 5


@torch.inference_mode()
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_kept_sets_are_those_of_kvpress(family: str, layerwise: bool) -> None:
    expected = kvzip_press_keeps(family, IDS, 1 - BUDGET / LENGTH, layerwise=layerwise, chunk_size=CHUNK)
    ours = tiny(family, dtype=torch.float32)
    found = kept_now(compressed(ours, "kvzip_layerwise" if layerwise else "kvzip"))[0]
    assert [[list(head) for head in layer] for layer in found] == expected


@pytest.mark.parametrize(("phase", "expected"), [("prompt", [0.0, 0.5, 0.2, 0.0]), ("decode", [0.0, 0.5, 0.2, 0.5])])
def test_only_a_decoded_token_scores_as_the_best_do_where_it_drew_nothing(phase: str, expected: list[float]) -> None:
    state = {"repeated": torch.tensor([0.0, 0.5, 0.2, 0.0]).view(1, 1, 4, 1)}
    own, places = SequenceInfo(prompts=(3,)), torch.arange(4).view(1, 1, 4)
    seen: Any = SimpleNamespace(phase=phase, sequences=own, positions=places)
    assert torch.equal(KVzip().score(seen, state), torch.tensor(expected).view(1, 1, 4))
