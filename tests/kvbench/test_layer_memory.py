"""What a scorer remembers of a layer, not of its slots: held, counted, joined and copied with its sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from kv_models import left_padded, prompt
from torch import Tensor
from transformers import PreTrainedModel

from kvbench import KVCache
from kvbench.cache.copies import fork, together
from kvbench.engine.logits import next_logits
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.policy import Policy
from kvbench.policies.scorers.scorer import Scorer

LENGTHS = (30, 41)
PROMPTS = [prompt(length, seed=length) for length in LENGTHS]


@dataclass(frozen=True)
class Remembers(Scorer):
    """Keeps the keys along the sum of all queries so far, of which it also remembers the number."""

    needs = Needs(memory=True)

    def observe(self, observation: Observation, state: State) -> None:
        real = observation.query_positions >= 0
        queries = observation.queries.masked_fill(~real[:, None, :, None], 0.0)
        new = {"sum": queries.sum((1, 2)), "count": real.sum(-1)}
        for name, x in new.items():
            observation.memory[name] = observation.memory[name] + x if name in observation.memory else x

    def score(self, observation: Observation, state: State) -> Tensor:
        return torch.einsum("bhtd,bd->bht", observation.keys, observation.memory["sum"])


POLICY = Policy(scorer=Remembers(), budget=20)


@torch.inference_mode()
def filled(model: PreTrainedModel, prompts: Sequence[Sequence[int]], policy: Policy = POLICY) -> KVCache:
    cache = KVCache(model.config, policy, prompt_length=[len(p) for p in prompts])
    ids, mask = left_padded(prompts)
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    return cache


@torch.inference_mode()
def decoded(model: PreTrainedModel, cache: KVCache, tokens: Sequence[int]) -> Tensor:
    out = []
    for token in tokens:
        seen = [sequence.seen for sequence in cache.sequences]
        ids, places = torch.tensor([[token]] * len(seen)), torch.tensor(seen)[:, None]
        out.append(next_logits(model, ids, places, cache))
    return torch.stack(out, 1)


def counts(cache: KVCache) -> list[list[int]]:
    """Queries that every layer remembers, sequence by sequence."""
    return [layer.memory["count"].tolist() for sequence in cache.sequences for layer in sequence.layers]


def test_it_is_of_every_sequence_by_itself_and_its_bytes_are_counted(model: PreTrainedModel) -> None:
    cache = filled(model, PROMPTS)
    assert counts(cache) == [[length] for length in LENGTHS for _ in range(2)]
    decoded(model, cache, [5, 6, 7])
    assert counts(cache) == [[length + 3] for length in LENGTHS for _ in range(2)]
    for sequence, ids in zip(cache.sequences, PROMPTS, strict=True):
        alone = filled(model, [ids])
        decoded(model, alone, [5, 6, 7])
        for layer, other in zip(sequence.layers, alone.sequence.layers, strict=True):
            assert layer.nbytes == layer.store.nbytes + 8 * 8 + 8  # sums of 8 float64 and a count of 8 bytes
            torch.testing.assert_close(layer.memory["sum"][0], other.memory["sum"][0])


def test_a_copy_and_a_batch_hold_it(model: PreTrainedModel) -> None:
    plain = [decoded(model, filled(model, [ids]), [5, 6, 7, 8]) for ids in PROMPTS]
    for row, ids in enumerate(PROMPTS):
        cache = filled(model, [ids])
        assert torch.equal(decoded(model, fork(cache), [5, 6, 7, 8]), plain[row])
        assert counts(cache) == [[len(ids)]] * 2, "a copy shares nothing"
    caches = [filled(model, [ids]) for ids in PROMPTS]
    batch = together(caches)
    assert counts(batch) == [[length] for length in LENGTHS for _ in range(2)]
    torch.testing.assert_close(decoded(model, batch, [5, 6]), torch.cat(plain)[:, :2])
    assert counts(batch) == [[length + 2] for length in LENGTHS for _ in range(2)]
    torch.testing.assert_close(decoded(model, caches[1], [7, 8]), plain[1][:, 2:])
