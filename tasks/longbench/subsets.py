"""The protocol of LongBench's 21 subsets as one table."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import ConfigError


@dataclass(frozen=True)
class Subset:
    """How one subset is asked and scored.

    metric: a key of `metrics.METRICS`. rows: in the official file. sha: how the sha256 of the official prompt template
    begins. chat: wrapped in the model's chat template. first_line: only the first line of an answer is scored.
    newline_ends: a newline token ends the answer as EOS does, and neither may be the first new token.
    Source: THUDM/LongBench at 2e00731, pred.py, eval.py and config/ in folder LongBench.
    """

    name: str
    category: str
    language: str
    metric: str
    max_new_tokens: int
    rows: int
    sha: str
    chat: bool = True
    first_line: bool = False
    newline_ends: bool = False


_LISTED = (
    Subset("narrativeqa", "single-document QA", "en", "qa_f1", 128, 200, "aada7ed24b06"),
    Subset("qasper", "single-document QA", "en", "qa_f1", 128, 200, "0fbdd123fe7f"),
    Subset("multifieldqa_en", "single-document QA", "en", "qa_f1", 64, 150, "20b4666a2de8"),
    Subset("multifieldqa_zh", "single-document QA", "zh", "qa_f1_zh", 64, 200, "344b3a4e557c"),
    Subset("hotpotqa", "multi-document QA", "en", "qa_f1", 32, 200, "9ec4ae308865"),
    Subset("2wikimqa", "multi-document QA", "en", "qa_f1", 32, 200, "9ec4ae308865"),
    Subset("musique", "multi-document QA", "en", "qa_f1", 32, 200, "9ec4ae308865"),
    Subset("dureader", "multi-document QA", "zh", "rouge_zh", 128, 200, "ae53329f51b1"),
    Subset("gov_report", "summarization", "en", "rouge", 512, 200, "91c25d585b18"),
    Subset("qmsum", "summarization", "en", "rouge", 512, 200, "dca23b678fe0"),
    Subset("multi_news", "summarization", "en", "rouge", 512, 200, "2af3f28c40b9"),
    Subset("vcsum", "summarization", "zh", "rouge_zh", 512, 200, "3e5d8241bc9b"),
    Subset("trec", "few-shot", "en", "classification", 64, 200, "0eff8bebdba9", chat=False, first_line=True),
    Subset("triviaqa", "few-shot", "en", "qa_f1", 32, 200, "00a802e6377e", chat=False, first_line=True),
    Subset("samsum", "few-shot", "en", "rouge", 128, 200, "a68d88423490", False, True, newline_ends=True),
    Subset("lsht", "few-shot", "zh", "classification", 64, 200, "f3edabdf7fae", chat=False, first_line=True),
    Subset("passage_count", "synthetic", "en", "count", 32, 200, "986550b6c610"),
    Subset("passage_retrieval_en", "synthetic", "en", "retrieval", 32, 200, "39b96b7fa52b"),
    Subset("passage_retrieval_zh", "synthetic", "zh", "retrieval_zh", 32, 200, "c1e2346e245e"),
    Subset("lcc", "code", "code", "code_sim", 64, 500, "6a1f24cf0bb8", chat=False),
    Subset("repobench-p", "code", "code", "code_sim", 64, 500, "ee9ec182ea5f", chat=False),
)
SUBSETS: dict[str, Subset] = {subset.name: subset for subset in _LISTED}

# The sets whose plain mean the papers on KV caches print: all but the Chinese ones.
PAPER_SETS = tuple(subset.name for subset in _LISTED if subset.language != "zh")

# LongBench-E has other rows of these, spread evenly over three bins of length.
EXTENDED = (
    "qasper",
    "multifieldqa_en",
    "hotpotqa",
    "2wikimqa",
    "gov_report",
    "multi_news",
    "trec",
    "triviaqa",
    "samsum",
    "passage_count",
    "passage_retrieval_en",
    "lcc",
    "repobench-p",
)


def find_subset(name: object) -> Subset:
    """The subset of that name; ValueError with all names where there is none."""
    if not isinstance(name, str) or name not in SUBSETS:
        raise ConfigError("subset", name, why=f"is not known, choose one of {', '.join(SUBSETS)}")
    return SUBSETS[name]
