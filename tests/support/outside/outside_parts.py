"""Parts of somebody's own: a scorer, a value, an allocator, a store, and a benchmark. Nothing of kvbench names them.

The tests copy this folder somewhere else and use it from there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.policies.allocators.allocator import Allocator
from kvbench.policies.checks import whole_number
from kvbench.policies.needs import Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer
from kvbench.policies.stores.codec import Codec
from kvbench.policies.values.caote import Caote
from kvbench.tasks.predictions import Line, text
from kvbench.tasks.task import Example, Scored, Task, Tokenizer


@dataclass(frozen=True)
class ValueNorm(Scorer):
    """Tokens of large values stay, and the newest `recent`."""

    recent: int = 2

    def __post_init__(self) -> None:
        whole_number("recent", self.recent, 0)

    def protects(self, budget: int) -> Protected:
        return Protected(newest=self.recent)

    def score(self, observation: Observation, state: State) -> Tensor:
        return observation.values.float().norm(dim=-1)


@dataclass(frozen=True)
class Loud(Caote):
    """CAOTE by another name."""


@dataclass(frozen=True)
class FirstMore(Allocator):
    """The first layer gets `extra` slots more than its share, the last layer as many less."""

    extra: int = 4

    def split(self, total: int, layers: int, length: int | None, floor: int) -> list[int]:
        base, more = divmod(total, layers)
        budgets = [base + (layer < more) for layer in range(layers)]
        given = min(self.extra, budgets[-1] - floor)
        budgets[0] += given
        budgets[-1] -= given
        return budgets


@dataclass(frozen=True)
class Half(Codec):
    """Keys and values in float16, once the prompt is complete and evicted; its settings are for show."""

    slug_letters: ClassVar[Mapping[str, str]] = {"w": "width", "s": "share", "at": "places"}

    width: int = 4
    share: float = 0.5
    places: tuple[int, ...] = ()

    def encode(self, x: Tensor, side: int) -> dict[str, Tensor]:
        return {"codes": x.half()}

    def decode(self, codes: Mapping[str, Tensor], side: int, tokens: int, dim: int) -> Tensor:
        return codes["codes"].float()


@dataclass(frozen=True, kw_only=True)
class Recall(Task):
    """A word among others, asked for at the end."""

    name: str = "recall"
    words: int = 12

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        for index in range(4 if limit is None else min(limit, 4)):
            draw = torch.Generator().manual_seed(1000 * seed + index)
            words = [f"word{int(n)}" for n in torch.randint(100, (self.words,), generator=draw)]
            metadata = {"task": self.name, "benchmark": "outside_parts", "length": self.words}
            yield Example(index, f"{' '.join(words)}. The first word was ", (words[0],), 4, metadata=metadata)

    def score(self, output: str, example: Example) -> float:
        return float(example.references[0] in output)


def summary(answers: Sequence[Scored]) -> dict[str, float | None]:
    """Percent of words found, and of answers that are not empty."""
    found = [100 * (answer.score or 0.0) for answer in answers]
    return {"found": fmean(found), "answered": fmean(100.0 * bool(answer.output) for answer in answers)}


FLAGS = {"ignore_case": "letters count as the same in both cases"}


def score_predictions(line: Line, ignore_case: bool = False) -> Line:
    """1 where the word is in the prediction."""
    prediction, word = text(line, "prediction"), text(line, "word")
    if ignore_case:
        prediction, word = prediction.lower(), word.lower()
    return {"score": float(word in prediction)}
