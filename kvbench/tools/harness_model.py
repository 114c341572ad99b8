"""lm-eval's view of a model under a policy: the model type `kvbench`, with every field of a policy as an argument.

    python -m kvbench.lm_eval --model kvbench --model_args pretrained=/my/model,policy=snapkv,budget=128 --tasks gsm8k

T tokens of a context, M of a continuation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from os.path import expanduser
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from kvbench.cache.cache import KVCache
from kvbench.cache.pressed import PressedCache, kept_by_layer
from kvbench.config.presets import make_policy
from kvbench.config.tree import find, read
from kvbench.engine.generate import generate_tokens
from kvbench.inference.rating import evicted, rated
from kvbench.inference.sampling import Draws, Sampling
from kvbench.models.loading import ModelSpec, load, locate, pick_device
from kvbench.models.prompts import end_tokens, stop_test
from kvbench.models.tokens import Encoder, Pair, encode, encode_pair, prefix_token
from kvbench.policies.checks import whole_number
from kvbench.policies.describe import describe
from kvbench.tasks.lm_eval.chat import chat_text, sampling_of
from kvbench.terminal.errors import UsageError, refusing

log = logging.getLogger(__name__)

HELD = ("requests_with_eviction", "kept_tokens", "cache_bytes")  # means over requests
NO_LIMIT = 2**31  # tokens, for windows of a model whose configuration names no longest context


@register_model("kvbench")
class KVBenchLM(TemplateLM):
    """A Hugging Face model whose cache a policy keeps small: every request has a cache of its own, which is audited.

    A context is compressed as a prompt, then its continuation is generated greedily or rated on what the cache holds.
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
        max_gen_toks: int = 256,
        trust_remote_code: bool = False,
        device_map: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **fields: Any,  # noqa: ANN401 - whatever the policy's parts have
    ) -> None:
        """pretrained: a name of conf/model such as `pocket`, a folder, or a hub id.

        fields: as `make_policy` takes them (window=16, ...). max_length: positions a request may take, None: all the
        model has. Raises ValueError for a wrong value.
        """
        super().__init__()
        if not str(pretrained):
            raise UsageError("pretrained is missing: --model_args pretrained=pocket,policy=snapkv,budget=128")
        if str(batch_size) not in ("1", "auto"):
            raise UsageError(f"batch_size={batch_size} is not allowed: requests are answered one by one (batch_size=1)")
        with refusing():
            whole_number("max_gen_toks", max_gen_toks, 1)
            if max_length is not None:
                whole_number("max_length", max_length, 1)
            self.policy = make_policy(policy, budget, **fields)
            self._checkpoint = locate(
                replace(_spec(str(pretrained), revision, trust_remote_code), device_map=device_map), dtype
            )
        first = _device(device)
        loaded = load(self._checkpoint, first)
        self._model, self._record = loaded.model, loaded.record
        self._place = first
        self.tokenizer: Any = self._checkpoint.tokenizer()
        self.max_length = max_length or self._checkpoint.max_positions
        self.max_gen_toks = max_gen_toks
        self._held: list[dict[str, float]] = []  # of each request, what its cache held at its end

    @property
    def device(self) -> torch.device:
        """Where requests are answered."""
        return self._place

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answer to each context, cut at its stop strings; sampled where its arguments ask for that.

        A request that is repeated draws other numbers, or has the same greedy answer.
        """
        answers: list[str] = []
        before: Instance | None = None
        repeated = 0
        for request in tqdm(requests, desc="Running generate_until requests", disable=disable_tqdm):
            repeated = repeated + 1 if before is not None and request.args == before.args else 0
            sampling = sampling_of(dict(normalize_gen_kwargs(request.args[1])))
            if repeated and sampling is None:
                answers.append(answers[-1])
            else:
                drawn = [Draws(Sampling(**sampling), 0, request.doc_id or 0, repeated)] if sampling else []
                answers.append(self._answer(*request.args, draws=drawn))
            before = request
            self.cache_hook.add_partial("generate_until", request.args, answers[-1])
        return answers

    def _answer(self, context: str, gen_kwargs: dict[str, Any], *, draws: Sequence[Draws]) -> str:
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        eos = self.tokenizer.decode([self.eot_token_id]) if self.tokenizer.eos_token_id is not None else None
        until = [stop for stop in handle_stop_sequences(kwargs["until"], eos) if stop]
        new = kwargs["max_gen_toks"]
        ids = self.tok_encode(context) or [self.prefix_token_id]
        if self.max_length is not None:
            if new >= self.max_length:
                raise ValueError(f"max_gen_toks={new} leaves no room for a prompt: max_length is {self.max_length}")
            ids = ids[-(self.max_length - new) :]
        done = generate_tokens(
            self._model,
            self._tensor(ids),
            self.policy,
            max_new_tokens=new,
            eos_token_ids=end_tokens(self._model.generation_config, self.tokenizer, stops=until),
            stop=stop_test(self.tokenizer, until),
            encoder=Encoder(self.tokenizer),
            draws=draws,
        )
        self._note(done.cache, len(ids))
        text = str(self.tokenizer.decode(done.tokens[0], skip_special_tokens=True))
        answer: str = postprocess_generated_text(text, until, None)
        return answer

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Sum of log p of each continuation after its compressed context, and whether greedy decoding writes it."""
        pairs = []
        for request in requests:
            context, continuation = request.args
            pair = encode_pair(self.tokenizer, context, continuation, self.max_length)
            pairs.append((request.args, pair.context, pair.continuation))
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,  # noqa: ANN401 - as lm-eval declares it
    ) -> list[tuple[float, bool]]:
        answers = []
        for texts, context, continuation in tqdm(requests, desc="Running loglikelihood requests", disable=disable_tqdm):
            answers.append(self._rate(Pair(context, continuation)))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        return answers

    def _rate(self, pair: Pair) -> tuple[float, bool]:
        rating = rated(self._model, pair, self.policy, Encoder(self.tokenizer))
        self._note(rating.cache, pair.tokens - 1)
        return rating.logprob, rating.greedy

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Sum of log p of all tokens of each text, in windows of `max_length`, the first token after BOS.

        A window is a continuation of its first token: only policies that evict while decoding evict here.
        """
        answers = []
        for request in tqdm(requests, desc="Running loglikelihood_rolling requests", disable=disable_tqdm):
            (text,) = request.args
            answers.append(sum(self._rate(window)[0] for window in self._windows(text)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), answers[-1])
        return answers

    def _windows(self, text: str) -> Iterator[Pair]:
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length or NO_LIMIT,
            context_len=1,
        )
        return (Pair(*make_disjoint_window(window)) for window in windows)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:  # noqa: ANN401
        """Token ids, with one BOS where the tokenizer uses one, unless `add_special_tokens` says otherwise."""
        if add_special_tokens is None:
            return encode(self.tokenizer, string)
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before the first one of a text."""
        return prefix_token(self.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval's cache of requests calls the tokenizer."""
        return str(self._checkpoint.folder).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The turns in the model's chat template, the last one left open where no new one is asked for."""
        return chat_text(self.tokenizer, chat_history, add_generation_prompt)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results: the model, the policy, and what the caches of all requests held."""
        held = self._held
        means = {name: fmean(one[name] for one in held) if held else None for name in HELD}
        return {
            "model_record": {key: str(value) for key, value in self._record.items()},
            "policy": describe(self.policy),
            "budget": self.policy.budget,
            "requests": len(held),
            **means,
            "peak_bytes": max((int(one["peak_bytes"]) for one in held), default=None),
        }

    def _note(self, cache: KVCache | PressedCache, fed: int) -> None:
        kept = float(torch.cat(kept_by_layer(cache), dim=1).float().mean())
        held = dict(zip(HELD, (evicted(cache, fed), kept, cache.held_nbytes), strict=True))
        self._held.append({**held, "peak_bytes": cache.peak_nbytes})

    def _tensor(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor([ids], dtype=torch.long, device=self._place)


def _device(asked: str | None) -> torch.device:
    """The device asked for; for `cuda:0`, which lm-eval's command line itself asks for, the CPU where there is none."""
    if asked == "cuda:0" and not torch.cuda.is_available():
        log.warning("there is no CUDA device here, the model runs on the CPU")
        asked = "cpu"
    return pick_device(asked or "auto")


def _spec(pretrained: str, revision: str | None, trust_remote_code: bool) -> ModelSpec:
    """Where `pretrained` lies: as conf/model says, in a folder, or on the hub."""
    if find("model", pretrained):
        known = ModelSpec(name=pretrained, **read("model", pretrained))
        return replace(known, revision=revision or known.revision, trust_remote_code=trust_remote_code)
    if Path(expanduser(pretrained)).is_dir():
        name = Path(expanduser(pretrained)).resolve().name
        return ModelSpec(name=name, path=pretrained, trust_remote_code=trust_remote_code)
    return ModelSpec(name=pretrained, hub_id=pretrained, revision=revision, trust_remote_code=trust_remote_code)
