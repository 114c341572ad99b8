"""Where tasks say that the evidence is: the marked texts are the needles, lines and documents that the answer needs."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ruler_files
from task_data import build, write

from kvbench.tasks.evidence import start_of
from kvbench.tasks.task import Example, Tokenizer


def marked(example: Example, name: str = "evidence") -> list[str]:
    """The marked texts, none of which is part of the question."""
    parts = example.spans.get(name, ())
    assert all(end <= len(example.prompt) - len(example.question) for _, end in parts)
    return [example.prompt[a:b] for a, b in parts]


def first(tokenizer: Tokenizer, name: str, *overrides: str) -> Example:
    return next(iter(build(name, *overrides).examples(tokenizer, 3)))


@pytest.mark.parametrize(
    ("name", "overrides", "needles", "others"),
    [
        ("niah", (), 1, 0),
        ("niah_multikey", (), 1, 7),
        ("niah_multivalue", (), 4, 0),
        ("niah_multiquery", (), 4, 4),
        ("niah_multi", (), 1, 3),
        ("niah_text", (), 1, 0),
        ("niah_paraphrased", (), 1, 3),
        ("niah_paraphrased", ("task.stated=true",), 2, 6),
        ("niah_paraphrased", ("task.stated=true", "task.hops=2"), 3, 9),
        ("arithmetic", (), 2, 6),
    ],
)
def test_needles_that_are_asked_for_are_the_evidence_and_others_distract(
    words: Tokenizer, name: str, overrides: tuple[str, ...], needles: int, others: int
) -> None:
    example = first(words, name, "task.lengths=[900]", *overrides)
    evidence, rest = marked(example), marked(example, "distractors")
    assert (len(evidence), len(rest)) == (needles, others)
    assert all(text.endswith(".") for text in (*evidence, *rest))
    if name != "arithmetic":  # whose answer is in no needle
        assert all(any(reference in text for text in evidence) for reference in example.references)
        assert not any(reference in text for text in rest for reference in example.references)


def test_operands_are_the_evidence_of_a_sum(words: Tokenizer) -> None:
    example = first(words, "arithmetic", "task.lengths=[400]", "task.operation=sum")
    numbers = [int(number) for text in marked(example) for number in re.findall(r"\d+", text)]
    assert sum(numbers) == int(example.references[0])


def test_each_turn_has_the_needle_of_its_question(words: Tokenizer) -> None:
    turns = list(build("niah_turns", "task.lengths=[900]").examples(words, 3, 4))
    assert [marked(one)[0].count(one.references[0]) for one in turns] == [1, 1, 1, 1]
    assert len({marked(one)[0] for one in turns}) == 4


def test_a_needle_in_the_dictated_part_is_not_in_the_prompt(words: Tokenizer) -> None:
    examples = list(build("niah", "task.lengths=[900]", "task.dictate_after=300").examples(words, 3, 10))
    kept = [marked(one) for one in examples]
    assert 0 < sum(map(bool, kept)) < 10
    assert all(one.references[0] in "".join(texts) for one, texts in zip(examples, kept, strict=True) if texts)


@pytest.mark.parametrize(
    ("name", "needles", "others"),
    [
        ("niah_single_1", 1, 0),
        ("niah_single_2", 1, 0),
        ("niah_multikey_1", 1, 3),
        ("niah_multikey_2", 1, 0),
        ("niah_multikey_3", 1, 0),
        ("niah_multivalue", 4, 0),
        ("niah_multiquery", 4, 0),
    ],
)
def test_needles_of_ruler(tmp_path: Path, words: Tokenizer, name: str, needles: int, others: int) -> None:
    folder = ruler_files.write(tmp_path)
    example = first(words, f"ruler/{name}", "task.length=1200", f"task.data_dir={folder}")
    evidence = marked(example)
    assert (len(evidence), len(marked(example, "distractors"))) == (needles, others)
    assert sorted(re.search(r"is: (.+)\.$", text)[1] for text in evidence) == sorted(example.references)


@pytest.mark.parametrize(("chains", "hops"), [(1, 4), (3, 2)])
def test_every_assignment_of_the_chain_is_the_evidence_of_variable_tracking(
    words: Tokenizer, chains: int, hops: int
) -> None:
    example = first(words, "ruler/vt", "task.length=1200", f"task.chains={chains}", f"task.hops={hops}")
    names = example.references
    assert re.fullmatch(rf"VAR {names[0]} = \d{{5}}", marked(example)[0])
    assert marked(example)[1:] == [f"VAR {b} = VAR {a}" for a, b in pairwise(names)]


def test_gold_documents_are_the_evidence_of_questions(tmp_path: Path, words: Tokenizer) -> None:
    folder = ruler_files.write(tmp_path)
    one = first(words, "ruler/qa_1", "task.length=1500", f"task.data_dir={folder}")
    (document,) = marked(one)
    assert document == ruler_files.squad()["data"][0]["paragraphs"][0]["context"]
    two = first(words, "ruler/qa_2", "task.length=1500", f"task.data_dir={folder}")
    rows = ruler_files.hotpotqa()[0]["context"]
    assert sorted(marked(two)) == [f"{title}\n{''.join(texts)}" for title, texts in (rows[2], rows[5])]


def test_words_to_count_have_no_evidence(words: Tokenizer) -> None:
    assert not first(words, "ruler/cwe", "task.length=1500").spans
    assert not first(words, "ruler/fwe", "task.length=1500").spans


KEYS = {f"key-{i}": f"value-{i}" for i in range(9)}


def test_the_pair_that_is_asked_for_is_the_evidence_of_key_value_tasks(tmp_path: Path, words: Tokenizer) -> None:
    turns = [{"input": f'Key: "key-{i}"\nThe value is: ', "answer": f"value-{i}"} for i in (4, 2)]
    row = {"id": 0, "context": "JSON data:\n" + json.dumps(KEYS), "multi_turns": turns}
    (tmp_path / "scbench_kv.jsonl").write_text(json.dumps(row), encoding="utf-8")
    examples = list(build("scbench/kv", f"task.data_dir={tmp_path}").examples(words, 0))
    assert [marked(one) for one in examples] == [['"key-4": "value-4"'], ['"key-2": "value-2"']]
    own = {"id": 0, "context": json.dumps(KEYS), "input": 'Key: "key-7"', "answer": ["value-7"], "options": []}
    (tmp_path / "kv_retrieval.jsonl").write_text(json.dumps(own), encoding="utf-8")
    (example,) = build("infinitebench/kv_retrieval", f"task.data_dir={tmp_path}").examples(words, 0)
    assert marked(example) == ['"key-7": "value-7"']


def test_a_pair_that_is_not_unique_is_no_evidence(tmp_path: Path, words: Tokenizer) -> None:
    twice = json.dumps(KEYS) + json.dumps(KEYS)
    row = {"id": 0, "context": twice, "multi_turns": [{"input": "key-4", "answer": "value-4"}]}
    (tmp_path / "scbench_kv.jsonl").write_text(json.dumps(row), encoding="utf-8")
    (example,) = build("scbench/kv", f"task.data_dir={tmp_path}").examples(words, 0)
    assert not example.spans


@pytest.mark.parametrize("kind", ["single_retrieval", "multi_retrieval", "multi_reasoning"])
@pytest.mark.parametrize("v2", ["false", "true"])
def test_needles_of_needlebench(tmp_path: Path, words: Tokenizer, kind: str, v2: str) -> None:
    folder = write(tmp_path)
    overrides = (f"task.kinds=[{kind}]", "task.languages=[en]", "task.counted_in=model", f"task.v2={v2}")
    task = build("needlebench/4k", f"task.data_dir={folder}", *overrides)
    pieces = _Lasting()
    example = next(iter(task.examples(pieces, 0)))
    assert len(marked(example)) == example.metadata["needles"]
    assert all(text.strip() == text for text in marked(example))


class _Lasting:
    """Words with their spaces, which can be put together again."""

    def encode(self, text: str) -> list[Any]:
        return re.findall(r"\s*\S+|\s+$", text)

    def decode(self, ids: list[Any]) -> str:
        return "".join(ids)


def asked(folder: Path, evidence: object) -> list[Example]:
    row = {"context": "The mill is red. The barn is red.", "question": "What is red?", "answers": ["x"]}
    (folder / "asked.jsonl").write_text(json.dumps({**row, "evidence": evidence}) + "\n", encoding="utf-8")
    frame = "Read {question} in {{braces}} {context}\n{question}"
    task = build("context_question", f"task.data_dir={folder}", "task.max_new_tokens=4", f"task.frame='{frame}'")
    return list(task.examples(_Lasting(), 0))


@pytest.mark.parametrize(
    ("evidence", "texts"),
    [
        (["The mill is red.", "barn"], ["The mill is red.", "barn"]),
        ([[0, 3], [4, 8]], ["The", "mill"]),
        (["barn", [0, 33]], ["barn", "The mill is red. The barn is red."]),
        ("barn", ["barn"]),
        ('["barn", [4, 8]]', ["barn", "mill"]),  # a column of a CSV file
        ([], []),
        (None, []),
    ],
)
def test_a_file_may_name_its_evidence(tmp_path: Path, evidence: object, texts: list[str]) -> None:
    (example,) = asked(tmp_path, evidence)
    assert marked(example) == texts


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        (["is red"], r"asked.jsonl, row 1: evidence 'is red' occurs 2 times in the context, it must occur once"),
        (["blue"], r"asked.jsonl, row 1: evidence 'blue' does not occur in the context"),
        ([" "], r"row 1: evidence ' ' does not occur"),
        ([[3, 3]], r"row 1: evidence \[3, 3\] is not allowed, it must be a text or a pair \[first, end\)"),
        ([[0, 34]], r"characters of the context \(0 to 33\)"),
        ([[-1, 2]], r"evidence \[-1, 2\] is not allowed"),
        ([[0.0, 2]], r"evidence \[0.0, 2\] is not allowed"),
        ([True], r"evidence True is not allowed"),
        ([3, 10], r"evidence 3 is not allowed"),
        ({"a": 1}, r"evidence is \{'a': 1\}, it must be a list of texts or of pairs"),
        (7, r"evidence is 7, it must be a list"),
    ],
)
def test_evidence_that_cannot_be_found_is_an_error_with_file_and_row(
    tmp_path: Path, evidence: object, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        asked(tmp_path, evidence)


def test_a_slot_begins_after_the_text_and_the_slots_before_it() -> None:
    template = "{{{a}}} and {b}: {c} {b}"
    filled = {"a": "one", "b": 22, "c": "three"}
    text = template.format(**filled)
    assert [text[start_of(template, name, **filled) :][: len(str(value))] for name, value in filled.items()] == [
        "one",
        "22",
        "three",
    ]
