"""lm-eval's Hugging Face model with a policy's cache: `--model kvbench` of `python -m kvbench.lm_eval`.

T tokens of a context, M of a continuation.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from os.path import expanduser
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from kvbench.cache.cache import KVCache
from kvbench.cache.pressed import PressedCache, kept_by_layer
from kvbench.config.presets import make_policy
from kvbench.config.tree import find, read
from kvbench.engine.answers import evicted
from kvbench.engine.generate import generate_tokens
from kvbench.engine.sequence import TokenSampler
from kvbench.engine.teacher_forcing import score_pair
from kvbench.errors import UsageError
from kvbench.models.loading import ModelSpec, load, locate, pick_device
from kvbench.models.prompts import end_tokens, stop_test
from kvbench.models.tokens import Encoder, Pair
from kvbench.policies.describe import describe
from kvbench.run.sampling import Sampling
from kvbench.tasks.lm_eval.chat import sampling_of
from kvbench.terminal.errors import refusing

log = logging.getLogger(__name__)


@register_model("kvbench")
class KVBenchLM(HFLM):
    """A Hugging Face model with a policy. Every request has its own cache, which is audited.

    The context is compressed as a prompt; then the continuation is generated or rated with the compressed cache.
    """

    def __init__(
        self,
        pretrained: str = "",
        policy: str = "full",
        budget: int | float | None = None,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        max_length: int | None = None,
        trust_remote_code: bool = False,
        device_map: str | None = None,
        batch_size: int = 1,
        max_batch_size: int | None = None,
        **fields: Any,  # noqa: ANN401 - fields of the policy's parts
    ) -> None:
        """pretrained: a name of conf/model such as `pocket`, a folder, or a hub id.

        fields: of the policy, as in `make_policy` (window=16, ...). max_length: maximum positions of a request, None:
        those of the model. Raises ValueError for a wrong value.
        """
        if not str(pretrained):
            raise UsageError("pretrained is missing: --model_args pretrained=pocket,policy=snapkv,budget=128")
        with refusing():
            self.policy = make_policy(policy, budget, **fields)
        spec = replace(_spec(str(pretrained), revision), trust_remote_code=trust_remote_code, device_map=device_map)
        if device == "cuda:0" and not torch.cuda.is_available():
            device = "cpu"  # the default of lm-eval's command line
        checkpoint = locate(spec, dtype)
        loaded = load(checkpoint, pick_device(device or "auto"))
        self._record = {key: str(value) for key, value in loaded.record.items()}
        self._held: list[dict[str, float]] = []
        tokenizer: Any = checkpoint.tokenizer()
        self._tokenizer = tokenizer
        super().__init__(
            pretrained=loaded.model,
            tokenizer=tokenizer,
            max_length=max_length,
            batch_size=batch_size,
            max_batch_size=max_batch_size,
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answers to the contexts. Sampled answers depend on the order of the requests, not on earlier calls."""
        self._answered = 0
        answers: list[str] = super().generate_until(requests, disable_tqdm)
        return answers

    def _model_generate(
        self,
        context: Tensor,
        max_length: int,
        stop: list[str],
        attention_mask: Tensor | None = None,
        **kwargs: Any,  # noqa: ANN401 - lm-eval's settings
    ) -> Tensor:
        """The contexts [B,T] and their answers, padded with EOS, [B,T+M]."""
        sampling = sampling_of(kwargs)
        numbers = range(self._answered, self._answered + len(context))
        self._answered += len(context)
        samplers = [TokenSampler(Sampling(**sampling), 0, number, 0) for number in numbers] if sampling else []
        done = generate_tokens(
            self.model,
            context,
            self.policy,
            attention_mask=attention_mask,
            max_new_tokens=max_length - context.shape[1],
            eos_token_ids=end_tokens(self.model.generation_config, self._tokenizer, stops=stop),
            stop=stop_test(self._tokenizer, [text for text in stop if text]),
            encoder=Encoder(self._tokenizer),
            samplers=samplers,
        )
        for _ in context:
            self._note(done.cache, context.shape[1], len(context))
        longest = max(map(len, done.tokens))
        padded = [tokens + [self.eot_token_id] * (longest - len(tokens)) for tokens in done.tokens]
        return torch.cat([context, torch.tensor(padded, dtype=context.dtype, device=context.device)], dim=1)

    def _loglikelihood_tokens(  # type: ignore[override]
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Sum of log p of each continuation after its compressed context, and whether greedy decoding generates it."""
        answers = []
        for texts, context, continuation in tqdm(requests, desc="Running loglikelihood requests", disable=disable_tqdm):
            most = self.max_length + 1 - len(continuation)
            pair = Pair(context[-most:], continuation)
            scores = score_pair(self.model, pair, self.policy, Encoder(self._tokenizer))
            self._note(scores.cache, pair.tokens - 1)
            answers.append((scores.logprob, bool(scores.greedy.all())))
            if texts is not None:  # None for perplexities
                self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        return answers

    def get_model_info(self) -> dict[str, Any]:
        """Information that lm-eval stores with its results: model, policy, and mean tokens and bytes of the caches."""
        held = self._held
        means = {name: fmean(one[name] for one in held) for name in held[0]} if held else {}
        if held:
            log.warning(
                "kvbench: %d requests, evicted in %.1f%%, kept %.1f tokens per KV head, cache %.3f MiB",
                len(held),
                100 * means["requests_with_eviction"],
                means["kept_tokens"],
                means["cache_bytes"] / 2**20,
            )
        policy = {"policy": describe(self.policy), "budget": self.policy.budget}
        return {"model_record": self._record, **policy, "requests": len(held), **means}

    def _note(self, cache: KVCache | PressedCache, fed: int, rows: int = 1) -> None:
        kept = float(torch.cat(kept_by_layer(cache), dim=1).float().mean())
        eviction = {"requests_with_eviction": float(evicted(cache, fed)), "kept_tokens": kept}
        size = {"cache_bytes": cache.held_nbytes / rows, "peak_bytes": cache.peak_nbytes / rows}
        self._held.append(eviction | size)


def _spec(pretrained: str, revision: str | None) -> ModelSpec:
    """The source of `pretrained`: conf/model, a folder, or the hub."""
    if find("model", pretrained):
        known = ModelSpec(name=pretrained, **read("model", pretrained))
        return replace(known, revision=revision or known.revision)
    if Path(expanduser(pretrained)).is_dir():
        return ModelSpec(name=Path(expanduser(pretrained)).resolve().name, path=pretrained)
    return ModelSpec(name=pretrained, hub_id=pretrained, revision=revision)
