"""lm-eval's Hugging Face model with a compressed cache: `--model kvbench` of `kvbench lm-eval`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from zlib import crc32

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from kvbench.config.compose import find, read
from kvbench.config.presets import make_policy
from kvbench.engine.answers import evicted
from kvbench.engine.generate import HeldCache, generate_tokens
from kvbench.engine.teacher_forcing import score_pair
from kvbench.errors import UsageError, refusing
from kvbench.models.answers import Ending, end_tokens
from kvbench.models.devices import pick_device
from kvbench.models.files import ModelSpec
from kvbench.models.loading import load, locate
from kvbench.models.tokens import Encoder, Pair, appended
from kvbench.policies.describe import describe
from kvbench.policies.draws import combined_seed

log = logging.getLogger(__name__)


@register_model("kvbench")
class KVBenchLM(HFLM):
    """A Hugging Face model with a policy. The context of a request is compressed as a prompt; decoding is greedy."""

    def __init__(
        self,
        pretrained: str = "",
        policy: str = "full",
        budget: int | float | None = None,
        *,
        dtype: str = "auto",
        device: str | None = None,
        max_length: int | None = None,
        batch_size: int = 1,
        max_batch_size: int | None = None,
        **fields: Any,  # noqa: ANN401 - fields of the policy
    ) -> None:
        """pretrained: a name of conf/model such as `pocket`, a folder, or a Hub id. fields: as in `make_policy`.

        max_length: maximum tokens of a request, None: the model's. Raises ValueError for a wrong value.
        """
        if not str(pretrained):
            raise UsageError("pretrained is missing: --model_args pretrained=pocket,policy=snapkv,budget=128")
        with refusing():
            self.policy = make_policy(policy, budget, **fields)
        device = None if device == "cuda:0" and not torch.cuda.is_available() else device  # lm-eval's default
        checkpoint = locate(_spec(str(pretrained)), dtype)
        loaded = load(checkpoint, pick_device(device or "auto"))
        self._record = {key: str(value) for key, value in loaded.record.items()}
        self._requests: list[dict[str, float]] = []
        self._answered: Counter[int] = Counter()  # answers to each context
        tokenizer: Any = checkpoint.tokenizer()
        self._tokenizer = tokenizer
        super().__init__(
            pretrained=loaded.model,
            tokenizer=tokenizer,
            max_length=max_length,
            batch_size=batch_size,
            max_batch_size=max_batch_size,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, *args: Any, **more: Any) -> list[int]:  # noqa: ANN401
        """lm-eval's tokens of a text, without the EOS that some tokenizers append."""
        ids: list[int] = super().tok_encode(string, add_special_tokens, *args, **more)
        end = appended(self._tokenizer)
        return ids[: -len(end)] if end and ids[-len(end) :] == end else ids

    def tok_batch_encode(self, strings: list[str], *args: Any, **more: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """lm-eval's tokens of left-padded texts, without the EOS that some tokenizers append."""
        ids, mask = super().tok_batch_encode(strings, *args, **more)
        end = appended(self._tokenizer)
        if not end or not (ids[:, -len(end) :] == ids.new_tensor(end)).all():
            return ids, mask
        return ids[:, : -len(end)], mask[:, : -len(end)]

    def _model_generate(
        self,
        context: Tensor,
        max_length: int,
        stop: list[str],
        attention_mask: Tensor | None = None,
        **kwargs: Any,  # noqa: ANN401 - lm-eval's settings
    ) -> Tensor:
        """Contexts [B,T] and their answers, padded with EOS, [B,T+M]."""
        if kwargs.pop("do_sample", False) or set(kwargs) - {"temperature", "top_p", "top_k", "min_p"}:
            raise UsageError("gen_kwargs: --model kvbench decodes greedily, use `kvbench task=lm_eval/NAME`")
        done = generate_tokens(
            self.model,
            context,
            self.policy,
            attention_mask=attention_mask,
            max_new_tokens=max_length - context.shape[1],
            eos_token_ids=end_tokens(self.model.generation_config, self._tokenizer, stops=stop),
            stop=Ending(self._tokenizer, [text for text in stop if text]).test,
            encoder=Encoder(self._tokenizer),
            examples=[self._example(row, True) for row in self._unpadded(context, attention_mask)],
        )
        for _ in context:
            self._measure(done.cache, context.shape[1], len(context))
        longest = max(map(len, done.tokens))
        padded = [tokens + [self.eot_token_id] * (longest - len(tokens)) for tokens in done.tokens]
        return torch.cat([context, torch.tensor(padded, dtype=context.dtype, device=context.device)], dim=1)

    def _loglikelihood_tokens(  # type: ignore[override]
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation after its compressed context, and whether greedy decoding gives it."""
        answers = []
        for texts, context, continuation in tqdm(requests, desc="Running loglikelihood requests", disable=disable_tqdm):
            pair = Pair(context[-(self.max_length + 1 - len(continuation)) :], continuation)
            policy = self.policy.for_example(*self._example(pair.context))
            scores = score_pair(self.model, pair, policy, Encoder(self._tokenizer))
            self._measure(scores.cache, pair.tokens - 1)
            answers.append((scores.logprob, bool(scores.greedy.all())))
            if texts is not None:  # None for perplexities
                self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        return answers

    @staticmethod
    def _unpadded(context: Tensor, mask: Tensor | None) -> list[list[int]]:
        rows = context if mask is None else [row[real.bool()] for row, real in zip(context, mask, strict=True)]
        return [row.tolist() for row in rows]

    def _example(self, context: Sequence[int], generates: bool = False) -> tuple[int, int]:
        """The seed (lm-eval's `--seed`) and number of a context, for policies that draw numbers per token.

        The number depends on the context instead of on the order of requests, which lm-eval sorts; answers to the
        same context count up, and all continuations of a context share its draws.
        """
        text = crc32(torch.tensor(context, dtype=torch.int64).numpy().tobytes())
        self._answered[text] += generates
        return torch.initial_seed() & (2**53 - 1), combined_seed(text, self._answered[text])

    def get_model_info(self) -> dict[str, Any]:
        """Fields of lm-eval's results file: model, policy, and mean tokens and bytes of the caches."""
        found = self._requests
        means = {name: fmean(one[name] for one in found) for name in found[0]} if found else {}
        if found:
            log.warning("kvbench: %d requests, means: %s", len(found), {k: round(v, 3) for k, v in means.items()})
        policy = {"policy": describe(self.policy), "budget": self.policy.budget}
        return {"model_record": self._record, **policy, "requests": len(found), **means}

    def _measure(self, cache: HeldCache, tokens: int, rows: int = 1) -> None:
        kept = float(torch.cat(cache.kept_by_layer(), dim=1).float().mean())
        counts = {"requests_with_eviction": float(evicted(cache, tokens)), "kept_tokens": kept}
        sizes = {"cache_bytes": cache.held_nbytes / rows, "peak_bytes": cache.peak_nbytes / rows}
        self._requests.append(counts | sizes)


def _spec(pretrained: str) -> ModelSpec:
    """A model of conf/model, a folder or a GGUF file, or a model of the Hub."""
    if find("model", pretrained):
        return ModelSpec(name=pretrained, **read("model", pretrained))
    folder = Path(pretrained).expanduser()
    if folder.exists():
        return ModelSpec(name=folder.resolve().name, path=pretrained)
    return ModelSpec(name=pretrained, hub_id=pretrained)
