"""Prompts, loading and sums of LongBench, on invented rows in the official format."""

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import longbench_rows
import pytest

from kvbench.tasks.hub import HubFile
from kvbench.tasks.longbench.subsets import EXTENDED, PAPER_SETS, SUBSETS
from kvbench.tasks.longbench.task import LongBench, LongBenchSuite
from kvbench.tasks.task import Example, Tokenizer

# name: rows, new tokens, first line only, chat
PUBLISHED: dict[str, tuple[int, int, bool, bool]] = {
    **dict.fromkeys(("narrativeqa", "qasper", "dureader"), (200, 128, False, True)),
    **dict.fromkeys(("multifieldqa_zh",), (200, 64, False, True)),
    **dict.fromkeys(("multifieldqa_en",), (150, 64, False, True)),
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique"), (200, 32, False, True)),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "vcsum"), (200, 512, False, True)),
    **dict.fromkeys(("trec", "lsht"), (200, 64, True, False)),
    **dict.fromkeys(("triviaqa",), (200, 32, True, False)),
    **dict.fromkeys(("samsum",), (200, 128, True, False)),
    **dict.fromkeys(("passage_count", "passage_retrieval_en", "passage_retrieval_zh"), (200, 32, False, True)),
    **dict.fromkeys(("lcc", "repobench-p"), (500, 64, False, False)),
}
# of the published templates, as JSON in the order of the names of their sets
SHA = "e7d865d712fe45e2455f5e864ac474001d7758d68d349e76ffbcdd382483358f"


def test_templates_are_the_published_ones_byte_for_byte() -> None:
    templates = {name: SUBSETS[name].prompt for name in sorted(SUBSETS)}
    assert hashlib.sha256(json.dumps(templates, ensure_ascii=False).encode()).hexdigest() == SHA


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return longbench_rows.write(tmp_path)


def first(task: LongBench, words: Tokenizer) -> Example:
    return next(task.examples(words, 0))


def test_the_protocol_is_the_published_table() -> None:
    assert set(SUBSETS) == set(PUBLISHED)
    assert sum(subset.rows for subset in SUBSETS.values()) == 4750
    for name, protocol in PUBLISHED.items():
        subset = SUBSETS[name]
        assert (subset.rows, subset.max_new_tokens, subset.first_line, subset.chat) == protocol
    assert [name for name, subset in SUBSETS.items() if subset.newline_ends] == ["samsum"]
    chinese = {"multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh"}
    assert set(PAPER_SETS) == set(PUBLISHED) - chinese
    assert len(PAPER_SETS) == 16
    assert set(EXTENDED) == set(longbench_rows.EXTENDED)
    assert len(EXTENDED) == 13


# --- loading ---


def zipped(folder: Path, into: Path) -> Path:
    with zipfile.ZipFile(into / "data.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in folder.glob("*.jsonl"):
            archive.write(path, f"data/{path.name}")
    return into


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


# --- suites and sums ---


def test_a_suite_asks_and_scores_each_subset_by_its_own_protocol(folder: Path, words: Tokenizer) -> None:
    subsets = ("qasper", "samsum", "trec")
    suite = LongBenchSuite(
        name="longbench", data_dir=str(folder), tasks={name: LongBench(subset=name) for name in subsets}
    )
    examples = list(suite.examples(words, 0))
    assert [example.metadata["task"] for example in examples] == [*subsets, *subsets]
    asking = [suite.task_of(example) for example in examples[:3]]
    assert [task.chat for task in asking] == [True, False, False]
    assert [task.end_texts for task in asking] == [(), ("\n",), ()]
    assert suite.score("Distance", examples[2]) == 1.0


# --- the real samples, where they are at hand ---

REAL = Path(__file__).parents[4] / "shared" / "data" / "longbench"


@pytest.mark.parametrize("name", ["multi_news", "multifieldqa_zh"])
def test_real_rows_are_read_and_an_answer_scores_full_marks(name: str, words: Tokenizer) -> None:
    if not (REAL / f"{name}.jsonl").is_file():
        pytest.skip(f"the sample of real rows is not at {REAL}")
    task = LongBench(subset=name, data_dir=str(REAL))
    examples = list(task.examples(words, 0))
    lines = (REAL / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(examples) == len(lines) > 0
    assert json.loads(lines[0])["context"] in examples[0].prompt
    assert all(task.score(example.references[0], example) == pytest.approx(1.0, abs=1e-6) for example in examples[:5])
