import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.tasks.ruler.predictions import PROTOCOLS
from kvbench.tasks.ruler.recorded import RulerFile
from kvbench.tasks.task import Tokenizer

REAL = Path(__file__).parents[4] / "shared" / "data" / "ruler" / "niah_multikey_3_4096.jsonl"
OLD = {"input": "Text. What is it? The special magic number for a mentioned in the provided text is", "outputs": ["12"]}
NEW = {"input": "Text. What is it?", "answer_prefix": " The special magic number for a is", "outputs": ["12"]}


def task(path: Path, lines: list[Any] | str, **fields: Any) -> RulerFile:
    content = lines if isinstance(lines, str) else "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(content, encoding="utf-8")
    return RulerFile(path=str(path), **fields)


def test_answers_are_as_long_and_scored_as_released() -> None:
    tokens = {name: protocol.max_new_tokens for name, protocol in PROTOCOLS.items()}
    assert {tokens[name] for name in tokens if name.startswith("niah")} == {128}
    assert len([name for name in tokens if name.startswith("niah")]) == 8
    rest = {name: tokens[name] for name in tokens if not name.startswith("niah")}
    assert rest == {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
    scores = {name: protocol.score(" a\x07b ", ("A", "x")) for name, protocol in PROTOCOLS.items()}
    assert [name for name, score in scores.items() if score == 1.0] == ["qa_1", "qa_2"]
    assert {score for name, score in scores.items() if not name.startswith("qa")} == {0.5}


def test_the_answer_prefix_is_split_off_where_it_is_inside_the_input(tmp_path: Path, words: Tokenizer) -> None:
    old, new = task(tmp_path / "file", [OLD, NEW], task="niah_single_1").examples(words, 0)
    assert (old.prompt, new.prompt) == ("Text. What is it?",) * 2
    assert old.prompt + old.answer_prefix == OLD["input"]
    assert new.answer_prefix == NEW["answer_prefix"]
    free = task(tmp_path / "file", [OLD, NEW], task="niah_single_1", answer_prefix=False).examples(words, 0)
    assert [(one.prompt, one.answer_prefix) for one in free] == [("Text. What is it?", "")] * 2
    assert (old.max_new_tokens, old.references) == (128, ("12",))


def test_real_lines_are_read_and_their_answers_score(words: Tokenizer) -> None:
    if not REAL.is_file():
        pytest.skip(f"the sample of real prompts is not at {REAL}")
    file = RulerFile(task="niah_multikey_3", path=str(REAL))
    examples = list(file.examples(words, 0))
    assert len(examples) == 30
    for example in examples:
        assert example.prompt.endswith("mentioned in the provided text?")
        assert example.answer_prefix.startswith(" The special magic uuid for ")
        assert example.references[0] in example.prompt
        assert file.score(example.references[0], example) == 1.0


@pytest.mark.parametrize("outputs", [[""], ["12", " "]])
def test_empty_references_are_refused_with_their_row(tmp_path: Path, words: Tokenizer, outputs: list[str]) -> None:
    file = task(tmp_path / "file", [NEW, {**NEW, "outputs": outputs}], task="niah_single_1")
    with pytest.raises(ValueError, match=r"row 2: outputs: .* is an empty text, which every output would contain"):
        list(file.examples(words, 0))
