"""LooGLE's scores of one output. BERTScore and the judge GPT-4 are left out: each needs another model.

Sources: bigai-nlco/LooGLE at 6734382, Evaluation/automatic_metrics.py and automatic_eval.py; NVIDIA/kvpress at 8bb29b9,
evaluation/benchmarks/loogle/calculate_metrics.py. All words are cut at white space.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from random import Random
from statistics import fmean
from warnings import catch_warnings, simplefilter

from kvbench.tasks.longbench.rouge import rouge_recalls

CLOZE = "shortdep_cloze"
TASKS = ("shortdep_qa", "longdep_qa", CLOZE, "longdep_summarization")
ORDERS = 16
Counts = tuple[int, int]
UNREADABLE = (SyntaxError, ValueError, TypeError, MemoryError, RecursionError)


def metric(task: str) -> str:
    """The metric that is the score of a task."""
    return "exact_match" if task == CLOZE else "rouge-l"


def similarities(output: str, reference: str, protocol: str = "authors") -> dict[str, float]:
    """BLEU, recall of ROUGE, METEOR. The authors read an empty output as "None", and raise for one of full stops."""
    if protocol == "authors" and not output:
        output = "None"
    return {**bleu(output, reference), **_rouge(output, reference, protocol), **meteor(output, reference)}


def bleu(output: str, reference: str) -> dict[str, float]:
    """BLEU of single words, and of 4-grams alone: with none in common a number as good as 0."""
    from nltk.translate.bleu_score import sentence_bleu  # here: a second that only some scores have to wait for

    weights = {"bleu1": (1, 0, 0, 0), "bleu4": (0, 0, 0, 1)}
    with catch_warnings():
        simplefilter("ignore")  # that there are no 4-grams in common
        return {name: float(sentence_bleu([reference.split()], output.split(), each)) for name, each in weights.items()}


def meteor(output: str, reference: str) -> dict[str, float]:
    """METEOR of distinct words without WordNet's synonyms: the mean over `ORDERS` rankings, and in the text's order.

    The official code takes the words as sets, whose order, and so the number of chunks, hangs on PYTHONHASHSEED: one
    ranking of all words for both sides.
    """
    from nltk.translate.meteor_score import single_meteor_score  # here: see `bleu`

    sides = [list(dict.fromkeys(text.split())) for text in (reference, output)]
    draw, every = Random(0), sorted({word for side in sides for word in side})
    rankings = [draw.sample(every, len(every)) for _ in range(ORDERS)]
    orders = [[[word for word in ranking if word in set(side)] for side in sides] for ranking in rankings]
    mean, in_order = (
        fmean(single_meteor_score(*pair, wordnet=_NoSynonyms()) for pair in pairs) for pairs in (orders, [sides])
    )
    return {"meteor_no_synonyms": mean, "meteor_in_order": in_order}


def cloze(output: str, reference: str, protocol: str = "authors") -> dict[str, Counts | None]:
    """(hits, blanks) of exact_match, equal values, and partial_match, a word in common.

    kvpress counts an output that is no dict as a single blank of exact_match, so that it costs less. A value that is no
    text makes kvpress's partial_match 0, and the authors' raise: None.
    """
    wanted = blanks(reference)
    filled = read_dict(output)
    if filled is None:
        return {"exact_match": (0, 1 if protocol == "kvpress" else len(wanted)), "partial_match": (0, len(wanted))}
    exact = sum(mask in filled and filled[mask] == value for mask, value in wanted.items())
    if all(isinstance(filled.get(mask, ""), str) for mask in wanted):
        return {"exact_match": (exact, len(wanted)), "partial_match": (_shared(filled, wanted), len(wanted))}
    return {"exact_match": (exact, len(wanted)), "partial_match": (0, len(wanted)) if protocol == "kvpress" else None}


def sound_cloze(output: str, reference: str) -> dict[str, Counts | None]:
    """The same for the first {...} of an output, at any place, as JSON or Python; every blank counts."""
    wanted = blanks(reference)
    found = re.search(r"\{.*?\}", output, re.DOTALL)
    filled = {mask: str(value) for mask, value in ((read_dict(found[0]) if found else None) or {}).items()}
    exact = sum(filled.get(mask) == value for mask, value in wanted.items())
    return {"exact_match": (exact, len(wanted)), "partial_match": (_shared(filled, wanted), len(wanted))}


def blanks(reference: str) -> dict[str, str]:
    """The reference of a cloze: what belongs in which blank. ValueError if it has another format."""
    wanted = json.loads(reference)
    if not isinstance(wanted, dict) or not wanted or not all(isinstance(value, str) for value in wanted.values()):
        raise ValueError(f"references must hold a JSON object of texts for a cloze, it is {reference!r:.60}")
    return wanted


def read_dict(output: str) -> Mapping[object, object] | None:
    """The dict that an output writes, as literal or call of dict; None for anything else. Nothing is evaluated."""
    try:
        node = ast.parse(output.lstrip(" \t"), mode="eval").body
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
            return {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
        value = ast.literal_eval(node)
    except UNREADABLE:
        return None
    return value if isinstance(value, dict) else None


def _shared(filled: Mapping[object, object], wanted: Mapping[str, str]) -> int:
    """How many values have a word in common."""
    return sum(not set(value.split()).isdisjoint(str(filled.get(mask, "")).split()) for mask, value in wanted.items())


def _rouge(output: str, reference: str, protocol: str) -> dict[str, float]:
    found = rouge_recalls(output, reference)
    if found is None:
        if protocol == "authors":
            raise ValueError("Hypothesis is empty.")
        return dict.fromkeys(("rouge-1", "rouge-2", "rouge-l"), 0.0)
    return found


class _NoSynonyms:
    """A WordNet without words."""

    def synsets(self, _: str) -> list[object]:
        return []
