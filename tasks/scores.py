"""Scores of one output against its references, and official aggregates of many.

Aggregates are the numbers that a benchmark's own scripts print, often not the mean over all examples.
metadata["benchmark"] of the examples names the benchmark: a package of `kvbench.tasks` with modules `summary` and
`predictions`, or your own module by its full name (`my_package.my_bench`). They may define:

    summary(answers)                   aggregates of scored answers by name, in the benchmark's own unit. Every answer
                                       has an output and, unless NEEDS_SCORES = False, a score
    SUBSETS_BY: str                    for averages over subsets: the metadata key with the subset's name
    averages(subsets)                  the subsets that each average of `summary` includes, by the average's name
    heat_map(answers)                  percent by (length, depth in percent), if a cell is not a mean over examples
    score_predictions(line, **flags)   fields added to a line of recorded predictions (see `tasks.predictions`)
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from statistics import fmean
from types import ModuleType
from unicodedata import normalize

from kvbench import tasks
from kvbench.tasks.task import Scored
from kvbench.tasks.trust import is_trusted

log = logging.getLogger(__name__)
NUMBER = re.compile(r"\d+\.\d+|\d+")  # without its sign


def best(score: Callable[[str, str], float]) -> Callable[[str, Sequence[str]], float]:
    """The best score over the references. For a string, each character is a reference."""
    return lambda output, references: max((score(output, reference) for reference in references), default=0.0)


def bag_f1(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """F1 of two bags of words: a word counts as often as it occurs in both."""
    common = (Counter(predicted) & Counter(expected)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return (2 * precision * recall) / (precision + recall)


_NO_LETTER = "0-9A-Za-z_\u00aa-\u1fff"  # Chinese and Japanese characters may touch a letter that stands alone
_BECAUSE = (
    "is|because|since|as|and|or|over|rather"  # words that follow an option, but neither "I" nor "A" of a sentence
)
_SENTENCE_WORD = re.compile(rf"(?:\bI|(?:^|[.!?\n])[\s*]*A)(?=\s+(?!(?:{_BECAUSE})\b)[a-z])")
_REJECTED = re.compile(r"(?:\bnot|n['’]t|rather than|instead of)\s+(?:option\s+)?[(*]*$")
_STATED = re.compile(
    r"(?:(?i:\b(?:answer|correct (?:choice|option))\s*(?:is|:|=))|答案(?:应该?)?[是为选]?|选择?(?!项))"
    r"[\s*:：(（\[\"'“$]*(?:(?i:option)\s+)?(?:\\(?:boxed|text)\s*\{)*[\s(（]*$"
)


def chosen_letter(output: str, letters: str) -> str | None:
    """The last letter that the output states ("the answer is B", "答案是B"), else the last one by itself; or None.

    letters: a range such as A-J. Neither the pronoun "I", nor "A" as the first word of a sentence, nor a letter that
    the output rejects ("not A") counts.
    """
    alone = re.compile(rf"(?<![{_NO_LETTER}])[{letters}](?![{_NO_LETTER}]|['’+#-][{_NO_LETTER}+])")
    words = {match.end() - 1 for match in _SENTENCE_WORD.finditer(output)}
    found = [match for match in alone.finditer(output) if match.start() not in words]
    found = [match for match in found if not _REJECTED.search(output, max(0, match.start() - 40), match.start())]
    stated = [match for match in found if _STATED.search(output, max(0, match.start() - 60), match.start())]
    return (stated or found)[-1][0] if found else None


def up_to_brace(text: str) -> str | None:
    """The text before the brace that closes an already open one; None if it is not closed."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:place]
    return None


def composed(text: str) -> str:
    """A text in Unicode's normal form C, in which an accented letter is one character: files and models have both."""
    return normalize("NFC", text)


def folded(text: str) -> str:
    """`composed`, in lower case."""
    return composed(text).lower()


def contains(output: str, references: tuple[str, ...]) -> float:
    """Share of the references that occur in the output, ignoring case. RULER calls it string_match_all."""
    text = folded(output)
    return sum(folded(reference) in text for reference in references) / len(references)


def contains_any(output: str, references: tuple[str, ...]) -> float:
    """1.0 if any reference occurs in the output, ignoring case. RULER calls it string_match_part."""
    text = folded(output)
    return float(any(folded(reference) in text for reference in references))


def needle_words(output: str, references: tuple[str, ...]) -> float:
    """Share of the distinct words of the references that occur in the output; punctuation is part of a word.

    Source: the average quoted in papers, Zefan-Cai/KVCache-Factory at c97f9d7, scripts/scripts_needle/visualize.py.
    """
    wanted = set(folded(" ".join(references)).split())
    return len(wanted & set(folded(output).split())) / len(wanted)


def rouge1_recall(output: str, references: tuple[str, ...]) -> float:
    """ROUGE-1 recall of the references, stemmed, by package rouge_score. D2O reports it times 100."""
    from rouge_score.rouge_scorer import RougeScorer  # here: imports nltk, which is slow

    recall: float = RougeScorer(["rouge1"], use_stemmer=True).score(" ".join(references), output)["rouge1"].recall
    return recall


def rouge_lsum(output: str, reference: str) -> float:
    """F1 of ROUGE-L over lines, not stemmed, by package rouge_score: InfiniteBench's and SCBench's summaries."""
    from rouge_score.rouge_scorer import RougeScorer  # here: see rouge1_recall

    return float(RougeScorer(["rougeLsum"]).score(reference, output)["rougeLsum"].fmeasure)


def benchmark_module(name: str, part: str) -> ModuleType:
    """The module with a benchmark's `part`. Raises ModuleNotFoundError if it does not exist."""
    own = f"{tasks.__name__}.{name}"
    return import_module(f"{own}.{part}" if name.isidentifier() and find_spec(own) else name)


def benchmarks_with(part: str) -> list[str]:
    """Sorted names of the benchmarks in `kvbench.tasks` that have such a part."""
    packages = sorted(module.name for module in iter_modules(tasks.__path__) if module.ispkg)
    return [name for name in packages if find_spec(f"{tasks.__name__}.{name}.{part}")]


def summary(answers: Sequence[Scored]) -> dict[str, float | None]:
    """Official aggregates of scored answers by name, in the unit of the benchmark (percent); {} if it defines none.

    Also {} while an answer has no output or no score, because a mean over the others would ignore failures.
    """
    module = summary_module(answers)
    if module is None or not hasattr(module, "summary") or any(answer.output is None for answer in answers):
        return {}
    if getattr(module, "NEEDS_SCORES", True) and any(answer.score is None for answer in answers):
        return {}
    found: dict[str, float | None] = module.summary(answers)
    return found


def summary_module(answers: Sequence[Scored]) -> ModuleType | None:
    """The summary module of the benchmark that all answers name; None without a common benchmark."""
    names = {answer.metadata.get("benchmark") for answer in answers}
    return _module(names.pop()) if len(names) == 1 else None


def subsets_by(answers: Sequence[Scored]) -> str | None:
    """The metadata key of the subsets that the benchmark averages with equal weights; None if it does not."""
    return getattr(summary_module(answers), "SUBSETS_BY", None)


def _module(benchmark: object) -> ModuleType | None:
    """The summary module of a benchmark; None, with a warning, if it is not installed or not trusted."""
    return _loaded(benchmark, is_trusted(benchmark)) if isinstance(benchmark, str) else None


@cache
def _loaded(benchmark: str, trusted: bool) -> ModuleType | None:
    if not trusted and not (benchmark.isidentifier() and find_spec(f"{tasks.__name__}.{benchmark}")):
        log.warning("the aggregates of benchmark %s are left out: --trust loads its module", benchmark)
        return None
    try:
        return benchmark_module(benchmark, "summary")
    except ModuleNotFoundError as error:
        log.warning("the aggregates of benchmark %s are left out: %s", benchmark, error)
        return None


def by_subset(answers: Sequence[Scored], key: str) -> dict[str, list[Scored]]:
    """The answers of each subset, in the order of their first appearance."""
    members: dict[str, list[Scored]] = {}
    for answer in answers:
        members.setdefault(answer.metadata[key], []).append(answer)
    return members


def scores_of(answers: Sequence[Scored]) -> list[float]:
    """The scores of answers, without missing ones."""
    return [answer.score for answer in answers if answer.score is not None]


def percent(scores: Sequence[float]) -> float | None:
    """Mean of scores from 0 to 1 in percent, rounded as LongBench and RULER do; None without scores."""
    return round(100 * fmean(scores), 2) if scores else None


def means(percents: Mapping[str, float | None], averages: Mapping[str, Sequence[str]]) -> dict[str, float | None]:
    """Averages over subsets by name; {} for a single subset. percents: the score of each subset."""
    if len(percents) < 2:
        return {}
    return {name: fmean(percents[member] or 0.0 for member in members) for name, members in averages.items()}


def mean_measures(answers: Sequence[Scored]) -> dict[str, float | None]:
    """Mean of every further metric of the answers, by its name, 0 to 100."""
    measured: list[Mapping[str, float]] = [getattr(answer, "measures", None) or {} for answer in answers]
    names = dict.fromkeys(name for found in measured for name in found)
    return {name: 100 * fmean(found[name] for found in measured) for name in names}
