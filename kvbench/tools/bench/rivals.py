"""Rivals that run in the same process on the same model: transformers' own caches, and the presses of kvpress.

A rival that is not installed is named once and left out. Its bytes are those of the tensors it holds: a press that
masks heads instead of cutting them holds everything.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache
from transformers.cache_utils import Cache

from kvbench.policies.press import ratio_for
from kvbench.terminal.errors import UsageError
from kvbench.tools.bench.providers import Provider


@dataclass(frozen=True)
class Rival:
    """A package, and how its provider is made for a budget and a prompt length."""

    package: str
    install: str
    make: Callable[[str, int | None, int], Provider]


def _dynamic(attention: str, name: str, budget: int | None, length: int) -> Provider:
    return Provider(name, attention, lambda *_: DynamicCache())


def _static(name: str, budget: int | None, length: int) -> Provider:
    """A cache of one size, whose steps torch.compile turns into graphs."""

    def cache(model: PreTrainedModel, prompt: int, new: int) -> Cache:
        return StaticCache(model.config, max_cache_len=prompt + new)

    return Provider(name, "sdpa", cache, compiled=True)


def _quantized(backend: str, bits: int, name: str, budget: int | None, length: int) -> Provider:
    axis = {"quanto": 0, "hqq": 1}[backend]  # what either backend takes

    def cache(model: PreTrainedModel, prompt: int, new: int) -> Cache:
        return QuantizedCache(backend, model.config, nbits=bits, axis_key=axis, axis_value=axis)

    return Provider(name, "sdpa", cache)


def _pressed(press: Callable[[Any, float], Any], name: str, budget: int | None, length: int) -> Provider:
    """A press of kvpress: it prunes the cache after the prompt; decoding grows."""
    import kvpress  # patches every attention function of transformers once it is imported: not before it is needed

    assert budget is not None
    made = press(kvpress, ratio_for(budget, length))
    # its hooks read `cache_position`, which transformers 5.3 and later no longer hand on
    return Provider(name, "sdpa", lambda *_: DynamicCache(), budget, prefilling=made, told_positions=True)


def _snapkv(kvpress: Any, share: float) -> Any:  # noqa: ANN401 - a package without types
    return kvpress.SnapKVPress(compression_ratio=share, window_size=32, kernel_size=7)


def _ada_snapkv(kvpress: Any, share: float) -> Any:  # noqa: ANN401
    return kvpress.AdaKVPress(_snapkv(kvpress, share))


def _plain(press: str, kvpress: Any, share: float) -> Any:  # noqa: ANN401
    """A press without settings of its own."""
    return getattr(kvpress, press)(compression_ratio=share)


KVPRESS = "--no-deps kvpress cachetools fire termcolor"
PRESSES: dict[str, Callable[[Any, float], Any]] = {
    "snapkv": _snapkv,
    "knorm": partial(_plain, "KnormPress"),
    "tova": partial(_plain, "TOVAPress"),
    "streamingllm": partial(_plain, "StreamingLLMPress"),
    "ada_snapkv": _ada_snapkv,
}
RIVALS = {
    "transformers_sdpa": Rival("transformers", "", partial(_dynamic, "sdpa")),
    "transformers_flex": Rival("transformers", "", partial(_dynamic, "flex_attention")),
    "transformers_flash2": Rival("flash_attn", "flash-attn", partial(_dynamic, "flash_attention_2")),
    "transformers_compiled": Rival("transformers", "", _static),
    "quanto_int2": Rival("optimum.quanto", "optimum-quanto", partial(_quantized, "quanto", 2)),
    "quanto_int4": Rival("optimum.quanto", "optimum-quanto", partial(_quantized, "quanto", 4)),
    "hqq_int4": Rival("hqq", "hqq", partial(_quantized, "hqq", 4)),
    **{f"kvpress_{slug}": Rival("kvpress", KVPRESS, partial(_pressed, press)) for slug, press in PRESSES.items()},
}


COMPILED = ("transformers_flex", "transformers_compiled")
"""Rivals that are usual on a GPU only: on a CPU they are asked for by name, and compile for minutes."""


def installed(package: str) -> bool:
    """Whether a package can be imported."""
    return all(map(importlib.util.find_spec, dict.fromkeys((package.partition(".")[0], package))))


def chosen(names: Sequence[str] | None, usual: Sequence[str], gpu: bool = True) -> tuple[list[str], list[str]]:
    """The rivals to run, and one line for each package that is not installed. names: None: the protocol's usual ones.

    UsageError for a name that is none.
    """
    for name in names or ():
        if name not in RIVALS:
            raise UsageError(f"rivals={name} is not known, choose from {', '.join(RIVALS)} or rivals=none")
    present, absent = list[str](), dict[str, list[str]]()
    for name in (one for one in usual if gpu or one not in COMPILED) if names is None else names:
        rival = RIVALS[name]
        how = f"{rival.package} is not installed{f': pip install {rival.install}' if rival.install else ''}"
        (present if installed(rival.package) else absent.setdefault(how, [])).append(name)
    return present, [f"without {', '.join(some)}: {how}" for how, some in absent.items()]


def provider(name: str, budget: int | None, length: int) -> Provider:
    """The rival of that name at a budget of tokens per KV head, for prompts of `length` tokens."""
    return RIVALS[name].make(name, budget, length)
