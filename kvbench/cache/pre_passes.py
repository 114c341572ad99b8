"""Evictions that wait for the extra forward passes of their policies, which the engine runs after the prompt."""

from collections.abc import Sequence

from torch import Tensor

from kvbench.cache.extra import Extra, When
from kvbench.cache.sequence import CachedSequence
from kvbench.cache.step import Step
from kvbench.policies.pre_passes.pre_pass import TokenRating


class PrePasses(Extra):
    """The steps of prompts whose evictions wait, one of each layer; their sequences are marked by `waits`."""

    def __init__(self) -> None:
        self._held: list[Step] = []

    def begin_call(self, sequences: Sequence[CachedSequence], mask: Tensor | None) -> None:
        for sequence in sequences:
            if sequence.policy.pre_pass is not None and sequence.error is None and not sequence.waits:
                try:
                    _check(sequence)
                except ValueError as error:
                    sequence.fail(error)

    def before_eviction(self, step: Step) -> When:
        if not (step.observed and step.sequence.waits and step.phase != "decode"):
            return "now"
        step.layer.unsettled = True
        self._held.append(step.without_queries())
        return "later"

    def of(self, sequence: CachedSequence) -> list[Step]:
        """The steps of a sequence that wait."""
        return [step for step in self._held if step.sequence is sequence]

    def release(self) -> list[Step]:
        """The steps of all sequences, which do not wait any more."""
        due, self._held = self._held, []
        for step in due:
            step.layer.unsettled = False
        return due


def _check(sequence: CachedSequence) -> None:
    """ValueError without what a pre-pass gives: `model.generate` runs none."""
    if sequence.in_prompt:
        raise ValueError(
            f"{sequence.policy.name} needs an extra forward pass over the prompt before it evicts, but model.generate "
            "runs none: use kvbench.generate"
        )
    if sequence.policy.rates and "ratings" not in sequence.given:
        raise ValueError(
            f"{sequence.policy.name} scores tokens by the model's own probabilities, which model.generate does not "
            "pass to its cache: use kvbench.generate"
        )


def rate(sequence: CachedSequence, logits: Tensor, tokens: Tensor) -> None:
    """Rate the tokens [1,n] of the next call with the logits [1,V] before them, if the policy rates tokens."""
    if isinstance(sequence.policy.pre_pass, TokenRating):
        sequence.given["ratings"] = sequence.policy.pre_pass.rate(logits[:, None], tokens)
