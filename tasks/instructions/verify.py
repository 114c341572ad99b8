"""Whether answers follow verifiable instructions (IFEval, IFBench), by the verifiers of the package if-verifiable.

Strict: the answer as it is; an empty one fails. Loose: any of 8 texts passes (as it is, without its first line, last
line, or both, each also without asterisks). Source: Zhou et al. 2023, arXiv 2311.07911; Pyatkin et al. 2025, IFBench;
evaluation_lib.py of both.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from kvbench.errors import ConfigError, from_extra
from kvbench.tasks.instructions.rules import LETTERS, any_character, ifbench_verifiers
from kvbench.tasks.predictions import RAISED
from kvbench.tasks.text_files import check_row

SENTENCES = ("length_constraints:number_sentences", "change_case:capital_word_frequency")
"""The instructions of IFEval that split text with NLTK's data."""
TAGGER = "words:start_verb"
"""The instruction of IFBench that also needs NLTK's tagger."""
_PLACES = {
    "punkt_tab": "tokenizers/punkt_tab",
    "stopwords": "corpora/stopwords",
    "averaged_perceptron_tagger_eng": "taggers/averaged_perceptron_tagger_eng",
}


@dataclass(frozen=True)
class Instructions:
    """The verifiable instructions of a prompt. kwargs: the arguments of each, without nulls."""

    benchmark: str
    prompt: str
    ids: tuple[str, ...]
    kwargs: tuple[Mapping[str, Any], ...]

    @property
    def metadata(self) -> dict[str, Any]:
        """What is stored with an example, for `instructions_of`."""
        return {"prompt": self.prompt, "instructions": list(self.ids), "kwargs": [dict(one) for one in self.kwargs]}

    def follows(self, answer: str) -> dict[str, list[bool]]:
        """`strict` and `loose`: whether an answer follows each instruction."""
        found: dict[str, list[bool]] = {"strict": [], "loose": []}
        for name, arguments in zip(self.ids, self.kwargs, strict=True):
            verifier = verifier_of(self.benchmark, name, arguments)
            passed = [_passes(verifier, text) for text in _variants(answer)]
            found["strict"].append(passed[0])
            found["loose"].append(any(passed))
        return found


def _variants(answer: str) -> list[str]:
    """The answer, and what is left without its first line, its last, or both; each also without asterisks."""
    lines = answer.split("\n")
    parts = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return [answer, *parts, *(text.replace("*", "") for text in (answer, *parts))]


def _passes(verifier: Any, text: str) -> bool:  # noqa: ANN401
    try:
        return bool(text.strip() and verifier.check_following(text))
    except RAISED:  # texts on which the official code fails
        return False


def verifier_of(benchmark: str, name: str, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """The verifier of an instruction. Raises ValueError if it would draw an argument that the row does not have."""
    verifier = registry(benchmark)[name](name)
    state = random.getstate()
    try:
        verifier.build_description(**arguments)
        if random.getstate() != state:
            raise ValueError("the official code would draw what is missing")
    finally:
        random.setstate(state)
    return verifier


def instructions_of(benchmark: str, metadata: Mapping[str, Any]) -> Instructions:
    """The instructions in the metadata of an example."""
    return Instructions(benchmark, metadata["prompt"], tuple(metadata["instructions"]), tuple(metadata["kwargs"]))


@cache
def registry(benchmark: str) -> Mapping[str, Any]:
    """The verifiers of a benchmark by name. Raises ValueError if their package is missing."""
    with from_extra("instructions", benchmark):
        found: Mapping[str, Any] = import_module(f"if_verifiable.{benchmark}.instructions_registry").INSTRUCTION_DICT
    seed_language_detection()
    return {**found, LETTERS: any_character(found[LETTERS])} if benchmark == "ifeval" else ifbench_verifiers(found)


def seed_language_detection() -> None:
    """Make langdetect return the same language for the same text."""
    from langdetect import DetectorFactory

    DetectorFactory.seed = 0


def read_instructions(benchmark: str, row: Any, where: str) -> Instructions:  # noqa: ANN401 - it is checked
    """The instructions of a row of IFEval or IFBench. Raises ValueError, naming the place, if it cannot be used."""
    check_row(row, ["prompt"], ["instruction_id_list"], where)
    names, kwargs = row["instruction_id_list"], row.get("kwargs")
    if not isinstance(kwargs, list) or len(kwargs) != len(names) or not all(isinstance(one, dict) for one in kwargs):
        raise ValueError(f"{where}: kwargs is {kwargs!r:.60}, it must be a list of {len(names)} objects of arguments")
    given = tuple({name: value for name, value in one.items() if value is not None} for one in kwargs)
    for name, arguments in zip(names, given, strict=True):
        if name not in registry(benchmark):
            raise ValueError(f"{where}: instruction {name} is not one of {benchmark}")
        try:
            verifier_of(benchmark, name, arguments)
        except RAISED as error:
            raise ValueError(f"{where}: the arguments {arguments!r:.80} do not fit {name} ({error})") from error
    return Instructions(benchmark, row["prompt"], tuple(names), given)


def check_nltk(benchmark: str, names: Sequence[str], advice: str = "") -> None:
    """Raise ValueError if NLTK's data for the instructions `names` is not on this machine."""
    from nltk import data

    splits = benchmark == "ifbench" or any(name in SENTENCES for name in names)
    needed = ["punkt_tab"] * splits + ["stopwords"] * (benchmark == "ifbench")
    needed += ["averaged_perceptron_tagger_eng"] * (TAGGER in names)
    for name in needed:
        try:
            data.find(_PLACES[name])
        except LookupError as error:
            more = f"; {advice}" if advice and name == "averaged_perceptron_tagger_eng" else ""
            raise ValueError(
                f"{benchmark} needs NLTK's data {name}, which is not on this machine: "
                f"`python -m nltk.downloader {name}`, or set NLTK_DATA to a folder with {_PLACES[name]}{more}"
            ) from error


def measures(found: Mapping[str, list[bool]]) -> dict[str, float]:
    """The four accuracies of an answer: of the prompt (all instructions) and of its instructions."""
    values = {}
    for kind, passed in found.items():
        values[f"prompt_{kind}"] = float(all(passed))
        values[f"instruction_{kind}"] = sum(passed) / len(passed)
    return values


METRICS = ("prompt_strict", "prompt_loose", "instruction_strict", "instruction_loose")


def check_metric(metric: str) -> None:
    """Raise ConfigError unless it is one of the accuracies."""
    if metric not in METRICS:
        raise ConfigError("metric", metric, " or ".join(METRICS))
