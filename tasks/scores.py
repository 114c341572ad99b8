"""Scores of one output against its references, 0 to 1, that several tasks share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

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


def up_to_brace(text: str) -> str | None:
    """The text before the brace that closes an already open one; None if it is not closed."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:place]
    return None


def contains(output: str, references: tuple[str, ...]) -> float:
    """Share of the references that occur in the output, ignoring case. RULER calls it string_match_all."""
    return sum(reference.lower() in output.lower() for reference in references) / len(references)


def contains_any(output: str, references: tuple[str, ...]) -> float:
    """1.0 if any reference occurs in the output, ignoring case. RULER calls it string_match_part."""
    return float(any(reference.lower() in output.lower() for reference in references))


def needle_words(output: str, references: tuple[str, ...]) -> float:
    """Share of the distinct words of the references that occur in the output; punctuation is part of a word.

    Source: the average quoted in papers, Zefan-Cai/KVCache-Factory at c97f9d7, scripts/scripts_needle/visualize.py.
    """
    wanted = set(" ".join(references).lower().split())
    return len(wanted & set(output.lower().split())) / len(wanted)


def rouge1_recall(output: str, references: tuple[str, ...]) -> float:
    """ROUGE-1 recall of the references, stemmed, by package rouge_score. D2O reports it times 100."""
    from rouge_score.rouge_scorer import RougeScorer  # here: imports nltk, which is slow

    recall: float = RougeScorer(["rouge1"], use_stemmer=True).score(" ".join(references), output)["rouge1"].recall
    return recall


def rouge_lsum(output: str, reference: str) -> float:
    """F1 of ROUGE-L over lines, not stemmed, by package rouge_score: InfiniteBench's and SCBench's summaries."""
    from rouge_score.rouge_scorer import RougeScorer  # here: see rouge1_recall

    return float(RougeScorer(["rougeLsum"]).score(reference, output)["rougeLsum"].fmeasure)
