"""The arguments of `evaluate`, `ask` and `generate`: keywords for type checkers and editors, and wrong calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypedDict, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def explaining_calls(function: Callable[P, T]) -> Callable[P, T]:
    """A public function whose TypeError for wrong arguments shows how it is called."""
    parameters = inspect.signature(function)
    first = [name for name, one in parameters.parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    shown = f"{function.__name__}({', '.join(first)}, *, ...)"

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            parameters.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{function.__name__}: {error}; call it as {shown}, other arguments by name") from None
        return function(*args, **kwargs)

    return called


class RunFields(TypedDict, total=False):
    """Fields of a run: see conf/config.yaml."""

    every: int | None
    protect: str | None
    watch: Sequence[Mapping[str, Any]]
    allow_version_mismatch: bool
    generation: Mapping[str, Any]
    engine: Mapping[str, Any]


class AskFields(RunFields, total=False):
    """Arguments of `evaluate` that have a meaning for `ask`."""

    schedule: str | None
    block: float | None
    decode: str | None
    limit: int | None
    seed: int
    batch: int | None
    dtype: str
    device: str
    out: str | Path | None
    config_dir: str | Path | None


class Fields(RunFields, total=False):
    """Fields of a run and of kvbench's tasks: see `kvbench tasks NAME`.

    Other fields, such as those of your own task and dotted names, are keywords of the type Any: `settings: dict[str,
    Any] = {"policy.scorer.window": 16}`, then `evaluate(..., **settings)`.
    """

    allow_code_execution: bool
    alpha: float
    answer: str
    answer_prefix: bool | str
    apply_chat_template: bool
    attack: str
    bundled: str | None
    cells: int | None
    chains: int
    chat: bool
    chat_template_args: Mapping[str, Any] | None
    common: int
    common_repeats: int
    counted_in: str
    data_dir: str | None
    dataset: str
    defense: str
    depths: Sequence[float]
    dictate_after: int | None
    digits: int
    documents: str | None
    encoding_dir: str | None
    end_texts: Sequence[str]
    exclude: Sequence[str]
    extended: bool
    fewshot_seed: int
    field: str
    file: str
    files: Sequence[str]
    frame: str
    gen_kwargs: Mapping[str, Any] | None
    haystack: str
    high: int
    history: str
    hops: int
    hub: str | None
    include_path: str | None
    key: str
    keys: int
    kinds: Sequence[str]
    kvpress_hub: str
    kvpress_revision: str
    languages: Sequence[str]
    length: int | None
    lengths: Sequence[int]
    letters: int
    low: int
    max_new_tokens: int | None
    metric: str | None
    metrics: Sequence[str]
    min_new_tokens: int
    min_tokens: int | None
    mode: str
    needle: str
    needle_seed: int
    needles: int
    num_fewshot: int | None
    official: bool
    operation: str
    other_repeats: int
    people: int
    place: str
    probe: str
    prompt: str
    prompt_tokens: int | None
    protocol: str
    queries: int
    question: str
    repeats: int | None
    revision: str | None
    samples: int
    sha256: str | None
    size: str
    split: str
    stated: bool
    stemmer: bool
    stop: Sequence[str]
    strict: bool
    subset: str | None
    system_instruction: str | None
    template_tokens: int
    texts: int | None
    think_begin: str | None
    think_end: str | None
    truncation: str
    turns_asked: int
    v2: bool
    value: str
    values: int
    vocabulary: int | None
