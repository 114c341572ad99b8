"""`kvbench.generate`: generation with kvbench's own loop, which policies with a pre-pass need."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvbench.api.fields import explaining_calls
from kvbench.engine.generate import Generation, generate_tokens
from kvbench.engine.sequence import TokenSampler
from kvbench.errors import ConfigError, UsageError, as_python, counted, whole_number
from kvbench.models.answers import Ending, end_tokens
from kvbench.models.given import borrowed
from kvbench.models.tokens import Encoder, encode
from kvbench.policies.policy import Policy
from kvbench.run import run_config


@explaining_calls
def generate(
    model: PreTrainedModel,
    prompt: Tensor | str,
    policy: Policy,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    attention_mask: Tensor | None = None,
    max_new_tokens: int = 128,
    min_new_tokens: int = 0,
    stop: Sequence[str] = (),
    context_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    samples: int = 1,
    seed: int = 0,
    question: int | Sequence[int] | None = None,
) -> Generation:
    """Generate under any policy, including those with a pre-pass, and audit the cache at the end.

    prompt: a text, or token ids [B,T], left-padded where attention_mask [B,T] is 0. tokenizer: needed for a text, for
    `stop` and for pre-passes that contain text (KVzip). stop: strings that end an answer. context_tokens: only the
    first tokens of the prompt are compressed; the rest is a question, appended afterwards. question: position of the
    question in a prompt that is compressed as a whole, one number or one per sequence, for policies that use it
    (FINCH). temperature: above 0, tokens are sampled from the `top_k` most likely ones within the `top_p` nucleus.
    samples: answers per row, which are neighbours in the result. seed: of sampled tokens and of policies that draw
    numbers per token (`random`, CaM), which also differ between rows and samples; a `KVCache` in `model.generate` has
    only the policy's own seed. `tokens` of the result are the answers, `cache` is the cache at the end.
    Warns of more tokens than the model has positions. Raises ValueError for a wrong value, BudgetError if the cache
    holds more than the policy allows.
    """
    max_new_tokens, min_new_tokens, seed = as_python((max_new_tokens, min_new_tokens, seed))
    _check(model, prompt, policy, tokenizer, attention_mask, stop)
    _check_numbers(max_new_tokens, min_new_tokens, seed, context_tokens)
    if isinstance(prompt, str):
        assert tokenizer is not None
        prompt = torch.tensor([encode(tokenizer, prompt)])
    _warn_of_positions(model, prompt.shape[1] + max_new_tokens)
    sampling = run_config.GenerationFields(temperature, top_p, top_k, samples).sampling
    answers = [(row, sample) for row in range(len(prompt)) for sample in range(samples)]
    samplers = [] if sampling is None or sampling.greedy else [TokenSampler(sampling, seed, *one) for one in answers]
    if isinstance(question, Sequence):
        question = [position for position in question for _ in range(samples)]
    with borrowed(model):
        return generate_tokens(
            model,
            prompt.repeat_interleave(samples, 0).to(model.device),
            policy,
            attention_mask=None if attention_mask is None else attention_mask.repeat_interleave(samples, 0),
            question=question,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            eos_token_ids=end_tokens(model.generation_config, tokenizer, stops=stop),
            stop=None if tokenizer is None else Ending(tokenizer, stop).test,
            context_tokens=context_tokens,
            samplers=samplers,
            examples=[(seed, index) for index in range(len(answers))],
            encoder=None if tokenizer is None else Encoder(tokenizer),
        )


def _check_numbers(max_new_tokens: int, min_new_tokens: int, seed: int, context_tokens: int | None) -> None:
    """Raise UsageError for numbers out of range."""
    whole_number("max_new_tokens", max_new_tokens, 1)
    whole_number("min_new_tokens", min_new_tokens, 0)
    whole_number("seed", seed, 0)
    if context_tokens is not None:
        whole_number("context_tokens", context_tokens, 1)


def _check(model: object, prompt: object, policy: object, tokenizer: object, mask: object, stop: object) -> None:
    """Raise UsageError for arguments of a wrong type or shape."""
    if not isinstance(model, PreTrainedModel):
        raise ConfigError("model", type(model), "a loaded model of transformers")
    if not isinstance(policy, Policy):
        raise ConfigError("policy", type(policy), "a Policy, such as make_policy('snapkv', 512) gives")
    if not isinstance(tokenizer, PreTrainedTokenizerBase | None):
        raise ConfigError("tokenizer", type(tokenizer), "a tokenizer of transformers")
    if isinstance(stop, str):
        raise ConfigError("stop", stop, "a list of strings")
    if tokenizer is None and (isinstance(prompt, str) or stop):
        raise UsageError(f"tokenizer= is missing, {'a text' if isinstance(prompt, str) else 'stop='} needs it")
    if not isinstance(prompt, str | Tensor):
        raise ConfigError("prompt", type(prompt), "a text or token ids [B,T], such as tokenizer(...).input_ids")
    if isinstance(prompt, Tensor) and (prompt.dim() != 2 or not prompt.numel() or prompt.is_floating_point()):
        got = f"{str(prompt.dtype).removeprefix('torch.')} {list(prompt.shape)}"
        raise ConfigError("prompt", got, "a text or token ids [B,T] of at least one token (ids[None] for one row)")
    embeddings: Any = model.get_input_embeddings()
    vocabulary = embeddings.weight.shape[0]
    if isinstance(prompt, Tensor) and not 0 <= int(prompt.min()) <= int(prompt.max()) < vocabulary:
        raise ConfigError("prompt", [int(prompt.min()), int(prompt.max())], f"token ids from 0 to {vocabulary - 1}")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != getattr(prompt, "shape", None)):
        shape: object = list(mask.shape) if isinstance(mask, Tensor) else type(mask)
        raise ConfigError("attention_mask", shape, "a tensor [B,T] with the shape of the token ids")


def _warn_of_positions(model: PreTrainedModel, tokens: int) -> None:
    """Warn, as transformers does, of more tokens than the model has positions."""
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        warnings.warn(
            f"the prompt and max_new_tokens are {counted(tokens, 'token')}, but the model has "
            f"{counted(positions, 'position')}: the text may "
            "lose its sense behind them",
            stacklevel=4,  # the caller of `generate`, which is wrapped
        )
