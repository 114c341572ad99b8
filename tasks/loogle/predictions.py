"""The official scores of recorded predictions on LooGLE."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.tasks.loogle.metrics import CLOZE, TASKS, Counts, blanks, cloze, metric, similarities, sound_cloze
from kvbench.tasks.predictions import JUDGES as JUDGES
from kvbench.tasks.predictions import RAISED, Line, nested, one_of, raised, text, texts, wanted_texts

FIELDS = "task, prediction and references (one text, or a JSON object for clozes); or, for clozes, lists of both"
NO_PARTIAL = raised(AttributeError("a value of the output is not a text, so partial_match has no value"))


def score_predictions(line: Line, protocol: str = "authors") -> Line:
    """`score` and all metrics as `scores`. The score is the recall of ROUGE-L (clozes: the share of exact matches).

    Clozes also have score_sound and scores_sound, which find the object inside other text. For a list of clozes,
    `score` and `scores` are sums of hits over sums of blanks (4 decimals) as in kvpress, the only known official number
    for lists; score_authors and scores_authors are the same sums of the authors' counts.
    Raises ValueError, naming the field, if the line has another format.
    """
    task = one_of(line, "task", TASKS)
    if isinstance(line.get("prediction"), list):
        if task != CLOZE:
            raise ValueError(f"prediction must be a text for {task}; only {CLOZE} has a score for lists")
        outputs = texts(line, "prediction")
        wanted = nested(line, "references", len(outputs))
        return _clozes([(output, answers[0]) for output, answers in zip(outputs, wanted, strict=True)], protocol)
    pair = text(line, "prediction"), wanted_texts(line, "references")[0]
    if task == CLOZE:
        return _cloze(pair, protocol)
    try:
        found = similarities(*pair, protocol)
    except RAISED as error:
        return {"score": None, "error": raised(error)}
    return {"score": found[metric(task)], "scores": found}


def _cloze(pair: tuple[str, str], protocol: str) -> Line:
    blanks(pair[1])
    counts, sound = cloze(*pair, protocol), _shares([sound_cloze(*pair)])
    found = {"score": _shares([counts])["exact_match"], "scores": counts}
    error = {"error": NO_PARTIAL} if counts["partial_match"] is None else {}
    return {**found, "score_sound": sound["exact_match"], "scores_sound": sound, **error}


def _clozes(pairs: Sequence[tuple[str, str]], protocol: str) -> Line:
    for _, reference in pairs:
        blanks(reference)
    sums = {"": [cloze(*pair, "kvpress") for pair in pairs], "_sound": [sound_cloze(*pair) for pair in pairs]}
    if protocol == "authors":
        sums["_authors"] = [cloze(*pair) for pair in pairs]
    found: Line = {}
    for name, counts in sums.items():
        shares = {metric: None if share is None else round(share, 4) for metric, share in _shares(counts).items()}
        found |= {f"score{name}": shares["exact_match"], f"scores{name}": shares}
        if shares["partial_match"] is None:
            found["error"] = NO_PARTIAL
    return found


def _shares(counts: Sequence[dict[str, Counts | None]]) -> dict[str, float | None]:
    """Hits over blanks of each metric; None if an output has no count."""
    found: dict[str, float | None] = {}
    for name in counts[0]:
        pairs = [pair for one in counts if (pair := one[name]) is not None]
        share = sum(hits for hits, _ in pairs) / sum(total for _, total in pairs) if pairs else 0.0
        found[name] = share if len(pairs) == len(counts) else None
    return found
