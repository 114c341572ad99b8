"""Conversations: prompts that follow each other in one cache, each brought to the budget at its end.

Shapes: T prompt tokens of a turn, S sequences, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.join import fork
from kvbench.inference.answer import Answer, choose
from kvbench.inference.calls import next_logits
from kvbench.inference.cuda_graph import Recorder
from kvbench.inference.generate import prefill
from kvbench.inference.generation import Generation, now
from kvbench.inference.pre_pass import rate_next, read_prompt
from kvbench.inference.sampling import Draws
from kvbench.policies.policy import Policy
from kvbench.policies.policy_checks import check_next_prompt
from kvbench.policies.pre_passes.pre_pass import PromptChoice, TextEncoder
from kvbench.policies.press import KVPress


def check_turns(policy: Policy) -> None:
    """ValueError where a policy cannot bring another prompt, after a first one, to its budget."""
    if isinstance(policy, KVPress):
        raise ValueError(f"{policy.name} is a press of kvpress, which compresses a single prompt: use mode=scdq")
    if isinstance(policy.pre_pass, PromptChoice):
        raise ValueError(f"{policy.name} rewrites a prompt before it is read, so none can follow it: use mode=scdq")
    if policy.schedule.late:
        raise ValueError(
            f"{policy.name} evicts only once a token after a prompt has attended to all of it (late=true), and in a "
            "conversation the next prompt follows: use another schedule or policy"
        )
    if policy.evicts:
        check_next_prompt(policy.name, policy.store, policy.allocator)


def take_turns(
    model: PreTrainedModel, cache: KVCache, logits: Tensor, prompts: Iterable[Tensor], encoder: TextEncoder | None
) -> Tensor:
    """Let later prompts [1,T] follow in a cache; logits [1,V] after the last, those given where there is none."""
    for ids in prompts:
        cache.next_prompt(ids.shape[1])
        logits = prefill(model, ids, None, cache, encoder)
    return logits


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
    def ask(
        self,
        prompt: Tensor,
        eos: Sequence[int],
        stop: Callable[[list[int]], bool] | None,
        most: int,
        least: int = 0,
        draws: Draws | None = None,
    ) -> Generation:
        """Take the next turn's prompt [1,T] in and answer as an `Answer` does, with at most `most` new tokens."""
        began = now(self._model)
        logits = self._read(prompt)
        assert self._cache is not None
        cache = self._cache if self._own else fork(self._cache)
        if not self._own:
            cache.expect(most - 1)  # the last one is never stored
        answer, steps = Answer(eos, stop, most, least, draws), 0
        recorder = Recorder(self._model) if self._graph else None
        step = choose(logits, [answer])
        prefilled = now(self._model)
        while not answer.done:
            steps += 1
            rate_next(cache, logits, step)
            places = torch.tensor([[cache.seen]], device=prompt.device)
            if recorder is None:
                logits = next_logits(self._model, step, None, places, cache)
            else:
                logits = recorder.step(cache, step, places)
            step = choose(logits, [answer])
        decoded = now(self._model)
        cache.on_device(False)
        cache.audit()
        self._unread = answer.tokens[steps:] if self._own else []
        return Generation([answer.tokens], cache, prefilled - began, decoded - prefilled, steps)

    def _read(self, prompt: Tensor) -> Tensor:
        """The logits [1,V] after the next turn's prompt."""
        self.turns += 1
        if self._cache is None:
            prompt, self._cache = read_prompt(self._model, prompt, None, self._policy, KVCache)
            return prefill(self._model, prompt, None, self._cache, self._encoder)
        ids = torch.cat([prompt.new_tensor([self._unread]), prompt], dim=1)
        return take_turns(self._model, self._cache, prompt[:0], [ids], self._encoder)

    def skip(self, prompt: Tensor) -> None:
        """Take the next turn's prompt [1,T] in and answer nothing."""
        self._read(prompt)
