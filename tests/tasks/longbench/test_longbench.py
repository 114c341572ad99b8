"""Prompts, loading and sums of LongBench, on invented rows in the official format."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import longbench_rows
import pytest

from kvbench.tasks.hub import HubFile
from kvbench.tasks.longbench.subsets import EXTENDED, PAPER_SETS, SUBSETS
from kvbench.tasks.longbench.summary import BINS, averages, length_bin, summary
from kvbench.tasks.longbench.task import LongBench, LongBenchSuite
from kvbench.tasks.longbench.templates import template
from kvbench.tasks.summary import summary as any_summary
from kvbench.tasks.task import Example, Tokenizer

# name: rows, new tokens, first line only, chat, how the template ends, its sha256: the table of the protocol
PUBLISHED: dict[str, tuple[int, int, bool, bool, str, str]] = {
    "narrativeqa": (200, 128, False, True, "Answer:", "aada7ed24b06"),
    "qasper": (200, 128, False, True, "Answer:", "0fbdd123fe7f"),
    "multifieldqa_en": (150, 64, False, True, "Answer:", "20b4666a2de8"),
    "multifieldqa_zh": (200, 64, False, True, "回答：", "344b3a4e557c"),
    "hotpotqa": (200, 32, False, True, "Answer:", "9ec4ae308865"),
    "2wikimqa": (200, 32, False, True, "Answer:", "9ec4ae308865"),
    "musique": (200, 32, False, True, "Answer:", "9ec4ae308865"),
    "dureader": (200, 128, False, True, "回答：", "ae53329f51b1"),
    "gov_report": (200, 512, False, True, "Summary:", "91c25d585b18"),
    "qmsum": (200, 512, False, True, "Answer:", "dca23b678fe0"),
    "multi_news": (200, 512, False, True, "Summary:", "2af3f28c40b9"),
    "vcsum": (200, 512, False, True, "会议总结：", "3e5d8241bc9b"),
    "trec": (200, 64, True, False, "{input}", "0eff8bebdba9"),
    "triviaqa": (200, 32, True, False, "{input}", "00a802e6377e"),
    "samsum": (200, 128, True, False, "{input}", "a68d88423490"),
    "lsht": (200, 64, True, False, "{input}", "f3edabdf7fae"),
    "passage_count": (200, 32, False, True, "answer is: ", "986550b6c610"),
    "passage_retrieval_en": (200, 32, False, True, "answer is: ", "39b96b7fa52b"),
    "passage_retrieval_zh": (200, 32, False, True, "答案是：", "c1e2346e245e"),
    "lcc": (500, 64, False, False, "Next line of code:\n", "6a1f24cf0bb8"),
    "repobench-p": (500, 64, False, False, "Next line of code:\n", "ee9ec182ea5f"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return longbench_rows.write(tmp_path)


def first(task: LongBench, words: Tokenizer) -> Example:
    return next(task.examples(words, 0))


def test_the_protocol_is_the_published_table() -> None:
    assert set(SUBSETS) == set(PUBLISHED)
    assert sum(subset.rows for subset in SUBSETS.values()) == 4750
    for name, (rows, tokens, first_line, chat, _, _) in PUBLISHED.items():
        subset = SUBSETS[name]
        assert (subset.rows, subset.max_new_tokens, subset.first_line, subset.chat) == (rows, tokens, first_line, chat)
    assert [name for name, subset in SUBSETS.items() if subset.newline_ends] == ["samsum"]
    chinese = {"multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh"}
    assert set(PAPER_SETS) == set(PUBLISHED) - chinese
    assert len(PAPER_SETS) == 16
    assert set(EXTENDED) == set(longbench_rows.EXTENDED)
    assert len(EXTENDED) == 13


@pytest.mark.parametrize("name", PUBLISHED)
def test_templates_are_the_published_ones_byte_for_byte(name: str) -> None:
    text = template(SUBSETS[name])
    assert hashlib.sha256(text.encode()).hexdigest().startswith(PUBLISHED[name][5])
    assert text.endswith(PUBLISHED[name][4])


def test_a_template_that_lm_eval_changed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"subset=qasper: lm-eval .* does not hold .* pip install lm-eval==0.4.13"):
        template(replace(SUBSETS["qasper"], sha="000000000000"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_prompt_is_the_template_with_the_row_in_its_slots(name: str, folder: Path, words: Tokenizer) -> None:
    task = LongBench(subset=name, data_dir=str(folder))
    example = first(task, words)
    row = longbench_rows.row(name)
    expected = template(SUBSETS[name]).replace("{input}", row["input"]).replace("{context}", row["context"])
    assert example.prompt == expected
    assert example.references == tuple(row["answers"])
    assert example.max_new_tokens == PUBLISHED[name][1]
    assert example.answer_prefix == ""
    assert example.metadata["subset"] == name
    assert (task.chat, task.truncation) == (PUBLISHED[name][3], "middle")
    assert task.score(row["answers"][0], example) == pytest.approx(1.0)


def test_samsum_alone_ends_at_a_newline_token_which_may_not_come_first() -> None:
    for name in PUBLISHED:
        task = LongBench(subset=name)
        assert (task.end_texts, task.min_new_tokens) == ((("\n",), 1) if name == "samsum" else ((), 0))
        assert task.stop == ()


def test_without_chat_no_subset_is_wrapped() -> None:
    assert not LongBench(subset="qasper", chat=False).chat


def test_extended_rows_say_their_bin(folder: Path, words: Tokenizer) -> None:
    task = LongBench(subset="qasper", extended=True, data_dir=str(folder))
    assert [example.metadata["bin"] for example in task.examples(words, 0)] == ["0-4k", "4-8k"]
    with pytest.raises(ValueError, match="subset=narrativeqa has no rows in LongBench-E, choose one of qasper"):
        LongBench(subset="narrativeqa", extended=True)


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (3999, 0), (4000, 1), (7999, 1), (8000, 2), (10**6, 2)])
def test_bins_end_before_4000_and_8000(length: int, expected: int) -> None:
    assert length_bin(length) == BINS[expected]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"subset": "narrative"}, "subset=narrative is not known, choose one of narrativeqa, qasper"),
        ({"subset": "qasper", "max_new_tokens": 0}, "max_new_tokens=0 is not allowed"),
        ({"subset": "qasper", "truncation": "right"}, "truncation=right is not known"),
    ],
)
def test_a_wrong_field_is_refused_with_its_name_and_value(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LongBench(**fields)


# --- loading ---


def zipped(folder: Path, into: Path) -> Path:
    with zipfile.ZipFile(into / "data.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in folder.glob("*.jsonl"):
            archive.write(path, f"data/{path.name}")
    return into


def test_a_copy_may_be_flat_or_unpacked_or_still_an_archive(folder: Path, tmp_path: Path, words: Tokenizer) -> None:
    expected = list(LongBench(subset="lsht", data_dir=str(folder)).examples(words, 0))
    unpacked, archived = tmp_path / "unpacked", tmp_path / "archived"
    archived.mkdir()
    (unpacked / "data").mkdir(parents=True)
    for path in folder.glob("*.jsonl"):
        (unpacked / "data" / path.name).write_bytes(path.read_bytes())
    for place in (unpacked, zipped(folder, archived)):
        assert list(LongBench(subset="lsht", data_dir=str(place)).examples(words, 0)) == expected


def test_a_limit_takes_the_first_rows(folder: Path, words: Tokenizer) -> None:
    task = LongBench(subset="qasper", data_dir=str(folder))
    assert list(task.examples(words, 0, 1)) == list(task.examples(words, 5))[:1]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", r"qasper\.jsonl is empty"),
        ('{"context": "a", "inp', r"qasper\.jsonl, line 1: not a JSON object, the file is damaged or cut off"),
        ("[1]", r"qasper\.jsonl, line 1: not a JSON object"),
        ('{"context": "a"}', r"line 1: input is None, LongBench has text there"),
        ('{"context": "a", "input": "", "answers": "b", "length": 1}', r"line 1: answers is 'b', .* a list of texts"),
        ('{"context": "a", "input": "", "answers": [], "length": 1}', r"line 1: answers is \[\], .* a list of texts"),
        ('{"context": "a", "input": "", "answers": ["b"], "length": "1"}', r"line 1: length is '1', .* a number there"),
        ('{"context":"a","input":"","answers":["b"],"length":1}\n\n{"x"', r"line 2: not a JSON object"),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(tmp_path: Path, content: str, sentence: str, words: Tokenizer) -> None:
    (tmp_path / "qasper.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=sentence):
        first(LongBench(subset="qasper", data_dir=str(tmp_path)), words)


def test_a_cut_off_archive_is_refused(folder: Path, tmp_path: Path, words: Tokenizer) -> None:
    place = tmp_path / "cut"
    place.mkdir()
    archive = zipped(folder, place) / "data.zip"
    archive.write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"data\.zip is damaged or not LongBench's data\.zip"):
        first(LongBench(subset="qasper", data_dir=str(place)), words)


def test_a_folder_without_the_file_says_what_to_put_there(tmp_path: Path, words: Tokenizer) -> None:
    archive = HubFile("owner/name", "abc", "data.zip")
    with pytest.raises(ValueError, match=r"has neither lcc\.jsonl nor data\.zip: download https://huggingface\.co/.*"):
        first(LongBench(subset="lcc", data_dir=str(tmp_path), archive=archive), words)


def test_without_network_one_sentence_says_what_to_download(monkeypatch: pytest.MonkeyPatch, words: Tokenizer) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"data\.zip cannot be downloaded \(OfflineMode.*give data_dir=<folder with"):
        first(LongBench(subset="qasper", archive=HubFile("nobody/nothing-of-that-name", "abc", "data.zip")), words)
    with pytest.raises(ValueError, match="data_dir=null is not allowed without an archive"):
        first(LongBench(subset="qasper"), words)


def test_a_cached_file_that_is_not_the_one_expected_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Tokenizer
) -> None:
    place = tmp_path / "hub"
    place.mkdir()
    archive = zipped(folder, place) / "data.zip"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: str(archive))
    wrong = HubFile("owner/name", "abc", "data.zip", sha256="cb45b11a4133" + 52 * "0")
    with pytest.raises(ValueError, match=r"data\.zip is damaged or another file \(sha256 .*, expected cb45b11a4133"):
        first(LongBench(subset="qasper", archive=wrong), words)
    right = replace(wrong, sha256=hashlib.sha256(archive.read_bytes()).hexdigest())
    assert first(LongBench(subset="qasper", archive=right), words).index == 0


def test_the_url_names_the_commit() -> None:
    file = HubFile("owner/name", "abc", "data.zip")
    assert file.url == "https://huggingface.co/datasets/owner/name/resolve/abc/data.zip"


# --- suites and sums ---


def test_a_suite_asks_and_scores_each_subset_by_its_own_protocol(folder: Path, words: Tokenizer) -> None:
    subsets = ("qasper", "samsum", "trec")
    suite = LongBenchSuite(
        name="longbench", data_dir=str(folder), tasks={name: LongBench(subset=name) for name in subsets}
    )
    examples = list(suite.examples(words, 0))
    assert [example.metadata["task"] for example in examples] == [*subsets, *subsets]
    asking = [suite.asking(example) for example in examples[:3]]
    assert [task.chat for task in asking] == [True, False, False]
    assert [task.end_texts for task in asking] == [(), ("\n",), ()]
    assert suite.score("Distance", examples[2]) == 1.0


def test_a_suite_of_other_tasks_is_refused() -> None:
    from kvbench.tasks.niah import Niah

    with pytest.raises(ValueError, match=r"tasks\.niah is not a subset of LongBench"):
        LongBenchSuite(name="mixed", tasks={"niah": Niah()})


@dataclass(frozen=True)
class Answer:
    """What a run keeps of an example."""

    score: float | None
    metadata: dict[str, Any] = field(default_factory=dict)
    references: tuple[str, ...] = ()
    output: str | None = ""


def answers(subset: str, scores: list[float], **more: object) -> list[Answer]:
    return [Answer(score, {"benchmark": "longbench", "subset": subset, "words": 1, **more}) for score in scores]


def test_sums_are_means_of_rounded_subset_means_and_not_of_examples() -> None:
    got = summary([*answers("qasper", [1.0, 0.0, 0.0]), *answers("hotpotqa", [1.0]), *answers("musique", [0.5])])
    assert got == {
        "subset=qasper": 33.33,
        "subset=hotpotqa": 100.0,
        "subset=musique": 50.0,
        "category=single-document QA": 33.33,
        "category=multi-document QA": 75.0,
        "average": pytest.approx((33.33 + 100 + 50) / 3, abs=1e-9),
    }


def test_all_21_subsets_also_give_the_average_of_16() -> None:
    scores = dict.fromkeys(PAPER_SETS, 40.0) | dict.fromkeys(set(SUBSETS) - set(PAPER_SETS), 61.0)
    got = averages(scores)
    assert got["average 16"] == 40.0
    assert got["average"] == pytest.approx((16 * 40 + 5 * 61) / 21)
    assert len([name for name in got if name.startswith("category=")]) == 6
    assert "average 16" not in averages(dict.fromkeys(PAPER_SETS, 40.0))


def test_extended_sums_have_bins_and_empty_ones_are_none() -> None:
    long = [Answer(1.0, {"benchmark": "longbench", "subset": "lcc", "words": 9000, "bin": "8k+"})]
    short = [Answer(0.5, {"benchmark": "longbench", "subset": "lcc", "words": 10, "bin": "0-4k"})]
    assert any_summary([*short, *long]) == {
        "subset=lcc": 75.0,
        "subset=lcc 0-4k": 50.0,
        "subset=lcc 4-8k": None,
        "subset=lcc 8k+": 100.0,
    }


def test_nothing_is_summed_up_while_a_score_is_missing() -> None:
    assert any_summary([*answers("lcc", [1.0]), Answer(None, {"benchmark": "longbench", "subset": "lcc"})]) == {}
    assert any_summary([Answer(1.0, {"task": "niah"})]) == {}


# --- the real samples, where they are at hand ---

REAL = Path(__file__).parents[4] / "shared" / "data" / "longbench"


@pytest.mark.parametrize("name", ["multi_news", "multifieldqa_zh"])
def test_real_rows_are_read_and_an_answer_scores_full_marks(name: str, words: Tokenizer) -> None:
    if not (REAL / f"{name}.jsonl").is_file():
        pytest.skip(f"the sample of real rows is not at {REAL}")
    task = LongBench(subset=name, data_dir=str(REAL))
    examples = list(task.examples(words, 0))
    lines = (REAL / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(examples) == len(lines) == 40
    assert json.loads(lines[0])["context"] in examples[0].prompt
    assert all(task.score(example.references[0], example) == pytest.approx(1.0, abs=1e-6) for example in examples[:5])
