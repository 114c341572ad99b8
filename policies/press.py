"""Presses of NVIDIA's kvpress as policies: kvpress compresses; kvbench supplies prompts and measures the cache."""

import importlib
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Literal

from kvbench.errors import ConfigError, instead
from kvbench.policies.checks import check_choices
from kvbench.policies.policy import Policy
from kvbench.policies.policy_checks import check_budget
from kvbench.policies.schedule import Prompt
from kvbench.policies.stores.dense import Dense

INSTALL = "pip install --no-deps kvpress cachetools fire termcolor"


def installed_version() -> str:
    """The installed version of kvpress. Raises ValueError with an install command if it is missing."""
    try:
        return version("kvpress")
    except PackageNotFoundError as error:
        raise ValueError(f"policy=kvpress runs presses of kvpress, which is not installed: {INSTALL}") from error


def ratio_for(kept: int, tokens: int) -> float:
    """The `compression_ratio` at which a press keeps `kept` of a prompt's tokens, or all if there are fewer.

    A press keeps int(tokens * (1 - ratio)); adding half a token makes this independent of rounding.
    """
    return max(0.0, 1 - (kept + 0.5) / tokens)


@dataclass(frozen=True)
class KVPress(Policy):
    """Any press of an installed kvpress, run as in its pipeline: the cache is compressed once, then it grows.

    Bytes and tokens are measured on its cache tensors: a press that masks keys (AdaKVPress) holds all of them. A budget
    is converted to the press's `compression_ratio` for each prompt, so that exactly `budget` tokens are kept. If a
    ratio is given, it is used instead, and the budget is the share of the prompt that is kept. A press without a ratio
    has no budget. A press that compresses while decoding (DecodingPress) gets the budget as its `target_size`, which it
    may exceed by its `compression_interval`.

    press: the name of a press class (`SnapKVPress`), or a press object. attention: the attention implementation, by its
    name in transformers; ObservedAttentionPress needs eager. version: version of kvpress, part of a run's identity.
    moments: when the press evicts from the prompt, and its rule while decoding, as tables show them.
    Source: https://github.com/NVIDIA/kvpress (Devoto et al. 2025, arXiv 2510.00636).
    """

    press: object = None
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    version: str = field(init=False, default="")
    moments: tuple[str, str] = field(init=False, default=("prompt", "grow"))
    generator: ClassVar[str | None] = "kvbench.engine.press.generate"

    @classmethod
    def named(cls, name: str) -> dict[str, object]:
        """The fields of the policy `kvpress/<name>`. Raises ValueError if there is no press of this name."""
        return {"press": {"_target_": press_class(name)}}

    def __post_init__(self) -> None:
        check_choices(self)
        object.__setattr__(self, "version", installed_version())
        object.__setattr__(self, "press", _made(self.press))
        self._check_parts()
        if getattr(self.press, "threshold", 0.0) is None:
            raise ConfigError("press.threshold", None, f"a score below which {self.kind} evicts a token")
        ratio, decoder = _ratio(self.press), decoding_part(self.press)
        if decodes(self.press):
            object.__setattr__(self, "moments", ("decoding" if decoder is self.press else "prompt", "press"))
        if decoder is not None:
            self._check_decoding(decoder)
        elif ratio or ratio is None:
            object.__setattr__(self, "budget", 1 - ratio if ratio else None)
        else:
            check_budget(self.budget, self.name)

    def _check_parts(self) -> None:
        """Raise ValueError for options of kvbench policies that presses do not support."""
        if self.schedule != Prompt(decode="grow"):
            raise ConfigError(
                "schedule",
                f"{self.schedule}, decode={self.schedule.decode}",
                why="is not supported: a press compresses the whole prompt once, then the cache grows (decode=grow)",
            )
        others = self.scorer, self.value, self.reader, self.pre_pass
        if any(part is not None for part in others) or self.store != Dense():
            raise ValueError(
                "policy=kvpress cannot be combined with a scorer, value, reader, pre-pass or store: the press replaces "
                "them"
            )

    def _check_decoding(self, decoder: Any) -> None:  # noqa: ANN401 - a package without types
        """Set or check the budget of a press that compresses while decoding. Raises ConfigError."""
        base = type(decoder.base_press).__name__
        if not isinstance(decoder.base_press, presses().ScorerPress):
            raise ConfigError(
                "press.base_press",
                base,
                why=f"masks keys, and {type(decoder).__name__} shows keys again that were masked before: use a press "
                "that frees tokens, such as SnapKVPress",
            )
        if not has_target_size(decoder):
            object.__setattr__(self, "budget", None)
            return
        if self.budget is None:
            object.__setattr__(self, "budget", decoder.target_size)
        check_budget(self.budget, self.name)

    @property
    def kind(self) -> str:
        """The name of the press's class."""
        return type(self.press).__name__


def decoding_part(press: object) -> Any:  # noqa: ANN401 - a package without types
    """The part of a press that compresses while decoding: a `DecodingPress`, or None."""
    part = getattr(press, "decoding_press", None) if isinstance(press, presses().PrefillDecodingPress) else press
    return part if isinstance(part, presses().DecodingPress) else None


def decodes(press: object) -> bool:
    """Whether a press compresses while tokens are decoded."""
    return decoding_part(press) is not None or bool(getattr(press, "decoding", False))


def has_target_size(decoder: object) -> bool:
    """Whether a `DecodingPress` returns to a number of tokens; otherwise to a share of the tokens seen."""
    return not isinstance(decoder, getattr(presses(), "CompressionRatioDecodingPress", ()))


def _ratio(press: object) -> float | None:
    """A press's `compression_ratio`; None if it has none, or only after it has run (DMSPress)."""
    try:
        return getattr(press, "compression_ratio", None)
    except AssertionError:
        return None


def presses() -> Any:  # noqa: ANN401 - a package without types
    """The package kvpress; importing it patches transformers' attention. ValueError if it cannot be imported."""
    installed = installed_version()
    try:
        return importlib.import_module("kvpress")
    except ImportError as error:
        raise ValueError(f"kvpress {installed} cannot be imported ({error}): {INSTALL}") from error


def press_classes() -> dict[str, type]:
    """The presses of the installed kvpress by their names, sorted. Raises ValueError if it cannot be imported."""
    package = presses()
    base = package.BasePress
    return {
        name: found
        for name, found in sorted(vars(package).items())
        if isinstance(found, type) and issubclass(found, base) and found is not base
    }


def press_class(name: str) -> str:
    """The import path of a kvpress press. Raises ValueError if there is no press of this name."""
    installed, known = installed_version(), press_classes()
    if name not in known:
        why = f"is not in kvpress {installed}{instead(name, list(known), command='policies kvpress')}"
        raise ConfigError("press", name, why=why)
    return f"{known[name].__module__}.{known[name].__qualname__}"


def _made(press: object) -> object:
    """Create a press from a press object or from the name of its class."""
    if isinstance(press, str):
        module, _, name = press_class(press).rpartition(".")
        try:
            return getattr(importlib.import_module(module), name)()
        except (TypeError, AssertionError) as error:  # the press wraps another press
            raise ConfigError("press", press, why=f"cannot be created without its settings: {error}") from error
    if not isinstance(press, presses().BasePress):
        raise ConfigError("press", press, why="must name a press of kvpress, such as policy=kvpress/SnapKVPress")
    return press
