"""Conversations: prompts that follow each other in one cache, each brought to the budget at its end.

Shapes: T prompt tokens of a turn, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.join import fork
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.generate import Generation, finish
from kvbench.engine.pre_pass import read_prompt
from kvbench.engine.prompt_pass import now, prefill
from kvbench.engine.sequence import LiveSequence, Request, choose_next
from kvbench.engine.turns import check_turns, take_turns
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import TextEncoder


class Conversation:
    """A conversation that has the model to itself: its turns in order, each from the cache the one before left.

    own: the model's own answers stay in the cache; else those in the prompts do, and what is generated leaves it again.
    """

    def __init__(
        self, model: PreTrainedModel, policy: Policy, own: bool, encoder: TextEncoder | None, cuda_graph: bool = False
    ) -> None:
        check_turns(policy)
        self._model, self._policy, self._own, self._encoder = model, policy, own, encoder
        self._graph = cuda_graph
        self._cache: KVCache | None = None
        self._unread: list[int] = []  # of the last answer, what the cache does not hold yet
        self.turns = 0
        """Turns that were taken."""

    @torch.inference_mode()
    def ask(self, request: Request, prompt: Tensor) -> Generation:
        """Append the next turn's prompt [1,T] and answer as the request asks."""
        began = now(self._model)
        logits = self._read(prompt)
        assert self._cache is not None
        cache = self._cache if self._own else fork(self._cache)
        if not self._own:
            cache.expect(request.max_new_tokens - 1)  # the last one is never stored
        sequence = LiveSequence(request, self._policy, request.answer(), cache, position=cache.seen)
        choose_next([sequence], logits)
        prefilled, batch = now(self._model), DecodeBatch(self._model, self._graph)
        batch.start([sequence])
        finish(batch, [sequence])
        assert sequence.cache is not None
        if self._own:
            self._cache, self._unread = sequence.cache, sequence.tokens[sequence.decode_steps :]
        seconds = prefilled - began, now(self._model) - prefilled
        return Generation([sequence.tokens], sequence.cache, *seconds, sequence.decode_steps)

    def _read(self, prompt: Tensor) -> Tensor:
        """The logits [1,V] after the next turn's prompt."""
        self.turns += 1
        if self._cache is None:
            prompt, self._cache = read_prompt(self._model, prompt, self._policy, KVCache)
            return prefill(self._model, prompt, None, self._cache, self._encoder)
        ids = torch.cat([prompt.new_tensor([self._unread]), prompt], dim=1)
        return take_turns(self._model, self._cache, prompt[:0], [ids], self._encoder)

    @torch.inference_mode()
    def skip(self, prompt: Tensor) -> None:
        """Append the next turn's prompt [1,T] and answer nothing."""
        self._read(prompt)


def limited(request: Request, tokens: int) -> Request:
    """The request of an earlier turn, whose answer has at most so many tokens and is not drawn."""
    return replace(request, max_new_tokens=tokens, draws=None, dictated=())
