"""The protocols by name, and what the command line says of one: key=value pairs, each checked in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from os.path import expanduser
from pathlib import Path
from typing import Annotated, get_type_hints

from kvbench.terminal.command import pairs
from kvbench.terminal.errors import UsageError
from kvbench.terminal.outputs import check_folder

ABOUT = {
    "cake_table13": "seconds of prefill and ms per decoded token against prompt length, 7k to 130k",
    "cake_fig7": "peak memory and ms per decoded token against prompt length (the cells of cake_table13)",
    "d2o_table5": (
        "tokens per second and the largest batch, budget = prompt length; also per sequence and at equal batches"
    ),
    "d2o_table12": "seconds of a whole answer, its prefill and one token, batch 1, budget 256",
    "ott_fig3": "throughput and memory of 2-bit stores against the batch, 64 tokens in and 384 out",
    "steps": "a decoding step, eager and as a CUDA graph: ms, how much of it the device was busy, launches",
    "sweep": "the engine against lone runs: 36 variants of one prompt; ms of a step against the rows in it",
    "kernels": "every kernel beside its rivals, checked first: ms, share of a copy's bandwidth, TFLOP/s",
    "targets": "what kvbench promises on a GPU: speed-ups, the cost of evicting, memory; each with its bound",
}
"""What each protocol measures: what `--help` lists without importing torch."""


LAPTOP = "model=pocket scale=64"


@dataclass(frozen=True)
class Settings:
    """Fields of the command line, each with its line of `--help`; None: as the protocol has it."""

    model: Annotated[str | None, "a name such as llama31_8b_instruct, pocket, or a folder"] = None
    weights: Annotated[str | None, "random or real"] = None
    layers: Annotated[int | None, "so many of the model's, such as 2"] = None
    dtype: Annotated[str | None, "such as bfloat16"] = None
    device: Annotated[str, "such as cuda"] = "auto"
    scale: Annotated[int, "divides lengths, batches, budgets, new tokens: " + LAPTOP + " runs on a laptop"] = 1
    policies: Annotated[list[str] | None, "such as snapkv,cake"] = None
    rivals: Annotated[list[str] | None, "such as transformers_sdpa,quanto_int2, or none"] = None
    lengths: Annotated[list[int] | None, "such as 7168,31744"] = None
    batches: Annotated[list[int] | None, "such as 1,8"] = None
    new_tokens: Annotated[int | None, "of the answer"] = None
    timed: Annotated[int | None, "so many of them are timed"] = None
    repeats: Annotated[int | None, "of a prefill or a round"] = None
    seconds: Annotated[int | None, "no cell begins once so many have passed; the same command goes on later"] = None
    decode: Annotated[str | None, "of sweep: evict or grow after the prompt, all policies alike"] = None
    cases: Annotated[str | None, "of kernels: folder of the cases (scripts/kernel_cases)"] = None
    only: Annotated[list[str] | None, "of kernels: cases with one of these words in their names"] = None
    out: Annotated[Path, "folder of the results (results/efficiency), from which the same command goes on"] = Path(
        "results/efficiency"
    )


def keys_help() -> str:
    """A line for each key."""
    hints = get_type_hints(Settings, include_extras=True)
    return "\n".join(f"  {name + '=':12} {hint.__metadata__[0]}" for name, hint in hints.items())


OF_KERNELS = ("scale", "device", "seconds", "cases", "only", "out")
"""All that the protocol `kernels` looks at, which runs no model."""
OF_ONE = {"cases": "kernels", "only": "kernels", "decode": "sweep"}
"""Settings that one protocol alone has a use for."""
DECODE = ("evict", "grow")


def parse(arguments: Sequence[str]) -> Settings:
    """The settings of key=value pairs. UsageError for anything unknown or of the wrong kind."""
    names = [f.name for f in fields(Settings)]
    given: dict[str, object] = {}
    for key, value in pairs(arguments, LAPTOP).items():
        if key not in names:
            raise UsageError(f"{key}={value} is not one of {', '.join(f'{name}=' for name in names)}")
        if not value:
            raise UsageError(f"{key}= needs a value")
        given[key] = _value(key, value)
    settings = Settings(**given)  # type: ignore[arg-type]
    if settings.timed and settings.new_tokens and settings.timed > settings.new_tokens:
        raise UsageError(f"timed={settings.timed} must be at most new_tokens={settings.new_tokens}")
    check_folder(settings.out, True, f"out={settings.out}")
    return settings


def check_used(protocol: str, settings: Settings) -> None:
    """Raise UsageError for a setting that a protocol has no use for."""
    for given in (f.name for f in fields(Settings) if getattr(settings, f.name) != f.default):
        if protocol == "kernels" and given not in OF_KERNELS:
            raise UsageError(f"{given}= has no effect: kernels runs no model, it takes {', '.join(OF_KERNELS)}")
        if protocol != OF_ONE.get(given, protocol):
            raise UsageError(f"{given}= has no effect on {protocol}: it is for {OF_ONE[given]}")


def _value(key: str, text: str) -> object:
    kind = get_type_hints(Settings)[key]
    if kind == Path:
        return Path(expanduser(text))
    if kind in (int, int | None):
        return _number(key, text)
    if key == "decode" and text not in DECODE:
        raise UsageError(f"decode={text} must be one of {', '.join(DECODE)}")
    if kind == list[int] | None:
        return [_number(key, part) for part in text.split(",")]
    if kind == list[str] | None:
        return [] if text == "none" else text.split(",")
    return text


def _number(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{key}={text} must be a whole number of at least 1")
    return int(text)


def scaled(number: int, scale: int, least: int) -> int:
    """A size divided by `scale`, but not below `least` unless it was so from the start."""
    return min(number, max(least, number // scale))
