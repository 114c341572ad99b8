"""RULER's variable tracking: follow a chain of assignments through noise and name every variable on it."""

from __future__ import annotations

import string
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from kvbench.errors import ConfigError, whole_number
from kvbench.tasks.evidence import needle_spans, shifted
from kvbench.tasks.ruler.base import Draws, SizedTask
from kvbench.tasks.ruler.templates import NOISE, Draft, template
from kvbench.tasks.task import Tokenizer

_WORKED_LENGTH = 500  # tokens of the worked example, at most
_WORKED_VALUE = "12345"  # a placeholder in the worked example


@dataclass(frozen=True, kw_only=True)
class _Chains(SizedTask):
    """Chains of assignments hidden in noise lines, without a worked example."""

    chains: int = 1
    hops: int = 4
    letters: ClassVar[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("chains", self.chains, 1, self.length)
        whole_number("hops", self.hops, 1)
        if self.hops + 1 > self.step:
            raise ConfigError("hops", self.hops, why=f"is too long for {self.name}, at most {self.step - 1} lines fit")

    @abstractmethod
    def value(self, draws: Draws) -> str:
        """The value of the first name of a chain."""

    def draft(self, size: int, draws: Draws) -> Draft:
        """One text of `size` noise lines with its chains, and the question for the first of them."""
        names, values = self._names(draws), []
        lines = [NOISE] * size
        chains = []
        for chain in names:
            values.append(self.value(draws))
            links = [f"VAR {name} = VAR {before} " for before, name in pairwise(chain)]
            chains.append([f"VAR {chain[0]} = {values[-1]}", *links])
        for chain_lines in chains:
            places = sorted(draws.stream.sample(range(len(lines)), len(chain_lines)))
            for shift, (place, line) in enumerate(zip(places, chain_lines, strict=True)):
                lines.insert(place + shift, line)
        context = "\n".join(lines).replace(". \n", ".\n")
        slots = {"context": context, "query": values[0], "num_v": self.hops + 1}
        spans = needle_spans(context, map(str.strip, chains[0]), ())
        return template("variable_tracking").fill(tuple(names[0]), spans, **slots)

    def _names(self, draws: Draws) -> list[list[str]]:
        """Distinct names, hops + 1 for each chain."""
        wanted = (self.hops + 1) * self.chains
        names: list[str] = [_name(self.letters, draws) for _ in range(wanted)]
        while len(set(names)) < wanted:
            names.append(_name(self.letters, draws))
        names = list(dict.fromkeys(names))
        return [names[i : i + self.hops + 1] for i in range(0, wanted, self.hops + 1)]


@dataclass(frozen=True, kw_only=True)
class _Worked(_Chains):
    """The worked example: short names, a placeholder as its value, no answer."""

    name: str = "vt's worked example"
    length: int = _WORKED_LENGTH
    max_new_tokens: int = 0
    letters: ClassVar[int] = 3

    @property
    def step(self) -> int:
        """Noise lines."""
        return 5

    def value(self, draws: Draws) -> str:
        """A placeholder, replaced in every sample."""
        return _WORKED_VALUE


@dataclass(frozen=True, kw_only=True)
class VariableTracking(_Chains):
    """`chains` chains of `hops` assignments among noise lines; all hops + 1 names of the first chain are requested.

    A worked example precedes the text; its names and its value are drawn for every sample.
    chains: number of chains. hops: assignments of a chain after its first.
    Source: NVIDIA/RULER at c3f5e3b, scripts/data/synthetic/variable_tracking.py.
    """

    name: str = "vt"
    max_new_tokens: int = 30
    letters: ClassVar[int] = 5

    @property
    def step(self) -> int:
        """Noise lines; smaller below 4096 tokens."""
        return 5 if self.length < 4096 else 10

    def value(self, draws: Draws) -> str:
        """Five digits."""
        return str(draws.numpy_stream.randint(10000, 99999))

    def drafts(self, tokenizer: Tokenizer, draws: Draws) -> Iterator[Draft]:
        """See `RulerTask.drafts`."""
        example = _Worked(chains=self.chains, hops=self.hops, template_tokens=self.template_tokens)
        worked = next(example.drafts(tokenizer, draws))
        shown = f"{worked.prompt}{worked.answer_prefix} {' '.join(worked.references)}\n"
        size = self.search(tokenizer, draws, self.prompt_limit - len(tokenizer.encode(shown)))

        def with_example(size: int) -> Draft:
            draft = self.draft(size, draws)
            before = f"{_redrawn(shown, worked.references, draws)}\n"
            return replace(draft, prompt=before + draft.prompt, spans=shifted(draft.spans, len(before)))

        while True:
            yield self.fitting(size, with_example, tokenizer)


def _name(letters: int, draws: Draws) -> str:
    return "".join(draws.stream.choices(string.ascii_uppercase, k=letters))


def _redrawn(shown: str, names: tuple[str, ...], draws: Draws) -> str:
    """The worked example with new names and a new value."""
    for name in names:
        shown = shown.replace(name, _name(len(name), draws))
    return shown.replace(_WORKED_VALUE, str(draws.numpy_stream.randint(10000, 99999)))
