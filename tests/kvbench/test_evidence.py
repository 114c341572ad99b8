"""Evidence kept: its tokens in the prompt, what is held when the answer begins, its numbers, and its table."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from char_tokenizer import CharTokenizer
from click.testing import CliRunner
from given_task import TEMPLATE, Given
from plotted_runs import sample, write_run
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import kvbench
from kvbench.engine.answers import request_for
from kvbench.errors import ConfigError
from kvbench.models.prompt import Prompt
from kvbench.models.prompts import PromptMaker
from kvbench.models.spans import token_spans, without
from kvbench.plot import cli as plot
from kvbench.report.__main__ import main as report
from kvbench.results.__main__ import main as results
from kvbench.results.kept import kept_spans
from kvbench.results.metrics import metrics
from kvbench.results.samples import Sample
from kvbench.tasks.niah import Niah
from kvbench.tasks.task import Example, FollowUp, Shared

STRIPS = TEMPLATE.replace("m.content", "m.content | trim")


@pytest.fixture
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


# --- tokens of the evidence ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("part", "tokens"),
    [((0, 2), (0, 1)), ((2, 4), (1, 2)), ((1, 3), (0, 2)), ((3, 4), (1, 2)), ((3, 5), (1, 3)), ((0, 7), (0, 4))],
)
def test_every_token_that_touches_a_part_belongs_to_it(part: tuple[int, int], tokens: tuple[int, int]) -> None:
    """Tokens of two characters: ab cd ef g."""

    def encode(text: str) -> list[int]:
        return [hash(text[i : i + 2]) for i in range(0, len(text), 2)]

    assert token_spans(encode, "abcdefg", encode("abcdefg"), {"x": (part,)}) == {"x": (tokens,)}


@pytest.mark.parametrize(
    ("part", "kept"),
    [((0, 3), (0, 3)), ((2, 5), (2, 3)), ((3, 7), None), ((5, 9), (3, 5)), ((7, 9), (3, 5)), ((1, 9), (1, 5))],
)
def test_a_part_shrinks_and_moves_with_what_is_cut_out(part: tuple[int, int], kept: tuple[int, int] | None) -> None:
    assert without({"x": (part,)}, 3, 7) == ({} if kept is None else {"x": (kept,)})


def example(prompt: str, *evidence: str, **fields: Any) -> Example:
    spans = tuple((prompt.index(text), prompt.index(text) + len(text)) for text in evidence)
    return Example(0, prompt, ("x",), max_new_tokens=10, spans={"evidence": spans}, **fields)


def marked(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[str]:
    return [tokenizer.decode(prompt.ids[a:b].tolist()) for a, b in prompt.spans.get("evidence", ())]


@pytest.mark.parametrize("template", [None, TEMPLATE, STRIPS])
def test_evidence_is_found_behind_a_chat_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
    tokenizer.chat_template = template
    maker = PromptMaker(tokenizer, Given(chat=True), 200)
    given = example("\n The mill is red. What is red?\n", "mill", "red.", answer_prefix=" It is")
    assert marked(tokenizer, maker.make(given)) == ["mill", "red."]
    context = replace(given, question="What is red?\n")
    assert marked(tokenizer, replace(maker, compress="context" if template != STRIPS else "prompt").make(context)) == [
        "mill",
        "red.",
    ]


def test_a_template_that_changes_the_prompt_leaves_the_evidence_unknown(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer.chat_template = TEMPLATE.replace("m.content", "m.content | upper")
    prompt = PromptMaker(tokenizer, Given(chat=True), 200).make(example("The mill is red.", "mill"))
    assert not prompt.spans
    assert "the chat template changes the prompt, so its evidence is unknown" in caplog.text


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_evidence_after_cutting(tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
    tokenizer.chat_template = template
    filler = "".join(f"{n:02d}" for n in range(50))
    given = example(f"one two {filler} six ten", "one", "two ", "00010203", "4849", " six", "ten")
    middle = PromptMaker(tokenizer, Given(truncation="middle", chat=True), 200, max_prompt_tokens=20)
    assert marked(tokenizer, middle.make(given)) == ["one", "two ", "0", "49", " six", "ten"]
    left = PromptMaker(tokenizer, Given(truncation="left", chat=True), 29)
    assert marked(tokenizer, left.make(given))[-2:] == [" six", "ten"]
    assert not {"one", "two "} & {*marked(tokenizer, left.make(given))}


def test_evidence_of_shared_contexts_and_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = TEMPLATE
    later = (FollowUp("A", "And now?", "A And now?", 10),)
    given = example("The mill is red. " + "." * 80 + " The barn is blue. What is red?", "mill", "barn")
    for shared in (Shared(10), Shared(10, later, 0), Shared(10, later, 1)):
        one = replace(given, question="What is red?", shared=shared)
        assert marked(tokenizer, PromptMaker(tokenizer, Given(chat=True), 300).make(one)) == ["mill", "barn"]
        cut = PromptMaker(tokenizer, Given(chat=True, truncation="middle"), 300, max_prompt_tokens=60)
        assert marked(tokenizer, cut.make(one)) == ["mill", "barn"]
        shorter = replace(cut, max_prompt_tokens=20)
        assert "barn" not in marked(tokenizer, shorter.make(one))


def test_policies_do_not_learn_where_the_evidence_is(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def noting(*arguments: Any) -> Any:
        requests.append(request_for(*arguments))
        return requests[-1]

    monkeypatch.setattr("kvbench.engine.scheduler.request_for", noting)
    (run,) = kvbench.evaluate(tiny_model, policies="snapkv", budgets=64, **SMALL)
    assert "evidence" in run.samples[0].kept_spans_start
    assert requests
    assert all(request.parts == request.protected == () for request in requests)
    with pytest.raises(ConfigError, match="divides the budget among the parts of a prompt"):
        kvbench.evaluate(tiny_model, policies="fair_snapkv", budgets=64, **SMALL)


# --- what is held ----------------------------------------------------------------------------------------------------
def test_shares_count_tokens_once_and_heads_that_hold_all() -> None:
    positions = [torch.tensor([[3, 4, -1], [4, 9, 1]]), torch.tensor([[0, 1, 2, 3], [4, 5, 3, -1]])]
    spans = {"evidence": ((3, 5), (4, 6)), "start": ((0, 2),), "none": ()}
    shares, whole = kept_spans(positions, spans)
    assert shares == {"evidence": (2 + 1 + 1 + 3) / 12, "start": (0 + 1 + 2 + 0) / 8}
    assert whole == {"evidence": 1 / 4, "start": 1 / 4}


SMALL: dict[str, Any] = {"tasks": "niah", "lengths": [300], "depths": [0.0, 1.0], "repeats": 1, "max_new_tokens": 8}
SINKS, BUDGET = 4, 180


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("decode", ["evict", "grow"])
def test_a_run_records_what_sinks_and_recent_tokens_leave_of_the_needle(
    tiny_model: Path, late: bool, decode: str
) -> None:
    """StreamingLLM keeps the first 4 tokens and the newest ones; a character is a token, and BOS is the first."""
    if late and decode == "grow":
        pytest.skip("late=true needs decode=evict")
    task = Niah(lengths=(300,), depths=(0.0, 1.0), repeats=1, max_new_tokens=8)
    examples = list(task.examples(CharTokenizer(), 0))
    fields = {"policy.schedule.late": late, "policy.scorer.sinks": SINKS, "decode": decode, "schedule": "prompt"}
    (run,) = kvbench.evaluate(tiny_model, policies="streamingllm", budgets=BUDGET, **SMALL, **fields)
    for one, given in zip(run.samples, examples, strict=False):
        ((a, b),) = given.spans["evidence"]
        a, b, prompt = a + 1, b + 1, one.prompt_tokens
        shares = []
        for seen in (prompt + late, prompt + one.decode_steps):
            newest = BUDGET - SINKS + (seen - prompt if decode == "grow" else 0)
            held = {*range(SINKS), *range(seen - newest, seen)}
            shares.append((len(held & {*range(a, b)}) / (b - a), len(held & {*range(prompt)}) / prompt))
        (start, kept_prompt), (end, _) = shares
        assert one.kept_spans_start == {"evidence": pytest.approx(start)}
        assert one.kept_spans == {"evidence": pytest.approx(end)}
        assert one.kept_prompt == pytest.approx(kept_prompt)
        assert one.heads_whole == {"evidence": float(start == 1)}
    assert run.samples[0].kept_spans_start["evidence"] < 1
    assert run.samples[1].kept_spans_start["evidence"] > 0


def test_full_keeps_all_and_fed_answers_record_it_too(tiny_model: Path) -> None:
    for fed in (False, True):
        full, other = kvbench.evaluate(
            tiny_model, policies=["full", "streamingllm"], budgets=BUDGET, divergence=fed, **SMALL
        )
        assert (full.kept_evidence, full.kept_prompt, full.evidence_lift, full.heads_whole) == (1, 1, 1, 1)
        assert 0 < other.kept_evidence < 1
        assert (other.evidence_right is None) == fed, "an answer that was fed has no score"


# --- numbers ---------------------------------------------------------------------------------------------------------
def kept(index: int, score: float, evidence: float, whole: float, prompt: float = 0.25) -> Sample:
    spans = {"kept_spans_start": {"evidence": evidence, "distractors": 0.1}, "kept_spans": {"evidence": evidence / 2}}
    return replace(sample(index, score), kept_prompt=prompt, heads_whole={"evidence": whole}, **spans)


WORKED = [kept(0, 1, 0.75, 0.5), kept(1, 1, 0.5, 0.0), kept(2, 0, 0.5, 0.25), kept(3, 0.5, 0.25, 0), kept(4, 0, 0.0, 0)]


def test_the_worked_example() -> None:
    """Five answers: two right, one missed with a head that holds all of it, two without such a head."""
    found = metrics(WORKED)
    assert found["kept_evidence"] == pytest.approx(0.4)
    assert found["kept_evidence_end"] == pytest.approx(0.2)
    assert found["kept_distractors"] == pytest.approx(0.1)
    assert (found["kept_prompt"], found["evidence_lift"]) == (0.25, pytest.approx(1.6))
    assert found["heads_whole"] == pytest.approx(0.15)
    assert (found["evidence_right"], found["evidence_missed"], found["evidence_evicted"]) == (0.4, 0.2, 0.4)
    assert found["evidence_right_minus_wrong"] == pytest.approx(0.625 - 0.25)
    assert found["evidence_right_minus_wrong_low"] is None, "below five answers of a kind"
    assert found["evidence_lift_low"] < 1.6 < found["evidence_lift_high"]
    assert found["kept_evidence_low"] < 0.4 < found["kept_evidence_high"]


def test_the_interval_of_right_minus_wrong_is_that_of_two_groups() -> None:
    right = [kept(i, 1, 0.6 + 0.05 * i, 1) for i in range(6)]
    wrong = [kept(6 + i, 0, 0.1 + 0.05 * i, 0) for i in range(5)]
    found = metrics([*right, *wrong])
    ends = found["evidence_right_minus_wrong_low"], found["evidence_right_minus_wrong_high"]
    assert ends[0] < found["evidence_right_minus_wrong"] < ends[1]
    spread = (
        sum((0.05 * (i - 2.5)) ** 2 for i in range(6)) / 36 + sum((0.05 * (i - 2)) ** 2 for i in range(5)) / 25
    ) ** 0.5
    assert ends[1] - ends[0] == pytest.approx(2 * 2.8 * spread, rel=0.2)  # t of 4 degrees of freedom


def test_runs_without_evidence_or_of_older_versions_have_no_numbers() -> None:
    for one in (sample(0, 1), replace(sample(0, 1), kept_spans={"evidence": 0.5})):
        found = metrics([one] * 5)
        assert found["kept_evidence"] is found["kept_evidence_end"] is found["evidence_right"] is None


# --- tables, figures and the report ----------------------------------------------------------------------------------
def test_table_figure_and_report_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    write_run(runs, "snapkv", [sample(i, 1) for i in range(5)])
    assert results(["collect", str(runs), "--metric", "evidence"]) != 0
    assert "has it (tasks with needles, RULER's niah, vt and qa" in capsys.readouterr().err
    assert CliRunner().invoke(plot, [str(runs), "--kind", "evidence", "-o", str(tmp_path / "x.svg")]).exit_code != 0
    write_run(runs, "h2o", WORKED)
    assert results(["collect", str(runs), "--metric", "evidence", "-o", str(tmp_path / "t.md")]) == 0
    table = (tmp_path / "t.md").read_text()
    assert "snapkv" not in table
    assert [cell in table for cell in (" 1.60 (", " 0.40 ", " 0.20 ", " +0.375 ")] == [True] * 4
    assert CliRunner().invoke(plot, [str(runs), "--kind", "evidence", "-o", str(tmp_path / "x.svg")]).exit_code == 0
    assert "no head holds all of it" in (tmp_path / "x.svg").read_text()
    assert report([str(runs), "-o", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text()
    assert page.count('id="evidence"') == page.count('href="#evidence"') == 1
