"""What the model reads: order of the strings, one BOS, cutting, and where an answer ends."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from given_task import TEMPLATE, Given
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, processors
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

import kvbench
from kvbench.errors import UsageError
from kvbench.models.answers import Ending, end_tokens
from kvbench.models.prompt import Prompt
from kvbench.models.prompts import PromptMaker
from kvbench.models.tokens import _warn_of_end, encode_pair
from kvbench.tasks.lm_eval.task import LmEval
from kvbench.tasks.task import Example, Reading, Shared, Task


@pytest.fixture
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


def example(prompt: str, new: int = 10, prefix: str = "") -> Example:
    return Example(0, prompt, ("x",), max_new_tokens=new, answer_prefix=prefix)


def text(tokenizer: PreTrainedTokenizerBase, maker: PromptMaker, given: Example) -> str:
    return str(tokenizer.decode(maker.make(given).ids.tolist()))


def test_a_plain_prompt_gets_one_bos_and_the_answer_prefix(tokenizer: PreTrainedTokenizerBase) -> None:
    got = text(tokenizer, PromptMaker(tokenizer, Given(), 100), example("Question?", prefix=" Answer:"))
    assert got == "<s>Question? Answer:"


def test_an_eos_that_the_tokenizer_appends_is_removed_once_and_said(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<s>", "</s>")}
    monkeypatch.setattr("kvbench.models.tokens._warn_of_end", cache(_warn_of_end.__wrapped__))
    raw: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    raw.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=list(ends.items()))
    assert tokenizer.decode(tokenizer.encode("Who?")) == "<s>Who?</s>", "else nothing is removed"
    maker = PromptMaker(tokenizer, Given(), 100)
    assert text(tokenizer, maker, example("Who?", prefix=" A")) == "<s>Who? A"
    assert text(tokenizer, maker, example("<s>Who?</s>")) == "<s>Who?</s>", "the end that the text itself has stays"
    assert text(tokenizer, maker, example("Who?</s>")) == "<s>Who?</s>"
    pair = encode_pair(tokenizer, "Who?", " I", None)
    assert (tokenizer.decode(pair.context), tokenizer.decode(pair.continuation)) == ("<s>Who?", " I")
    reading = replace(example("The mill"), reading=Reading())
    assert text(tokenizer, maker, reading) == "<s>The mill"
    assert [record.getMessage() for record in caplog.records] == [
        "the tokenizer appends </s> to every text; kvbench removes it from prompts and scored texts"
    ]


def test_the_chat_template_wraps_the_prompt_but_not_the_answer_prefix(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = TEMPLATE
    maker = PromptMaker(tokenizer, Given(chat=True), 100)
    assert text(tokenizer, maker, example("Question?", prefix="Answer:")) == "<s>[Question?]>Answer:"


SYSTEM = """<s>{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"""


def test_a_system_prompt_comes_first_in_the_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = SYSTEM
    maker = PromptMaker(tokenizer, Given(chat=True), 100, system_prompt="Be brief.")
    assert text(tokenizer, maker, example("Hi?")) == "<s>[system]Be brief.[user]Hi?[assistant]"
    asked = replace(example("Context Hi?"), question=" Hi?")
    context = replace(maker, compress="context").make(asked)
    assert tokenizer.decode(context.ids[: context.context_tokens].tolist()) == "<s>[system]Be brief.[user]Context"
    shared = maker.make(replace(asked, shared=Shared(10)))
    assert tokenizer.decode(shared.ids.tolist()) == "<s>[system]Be brief.[user]Context Hi?[assistant]"
    cut = PromptMaker(tokenizer, Given(chat=True, truncation="left"), 60, system_prompt="Be brief.")
    assert text(tokenizer, cut, example("a" * 90)).startswith("<s>[system]Be brief.[user]aaa")


@pytest.mark.parametrize(
    ("template", "chat", "why"),
    [
        (None, True, "task given has prompts without chat template"),
        (SYSTEM, False, "task given has prompts without chat template"),
        ("{{ messages[-1].content }}", True, "the model's chat template has no system message"),
        ("{{ raise_exception('no system role') }}", True, r"has no system message \(no system role\)"),
    ],
)
def test_a_system_prompt_that_would_be_lost_is_refused(
    tokenizer: PreTrainedTokenizerBase, template: str | None, chat: bool, why: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match=rf"^model\.system_prompt cannot be used: .*{why}"):
        PromptMaker(tokenizer, Given(chat=chat), 100, system_prompt="Be brief.").make(example("Hi?"))


def test_a_system_prompt_is_another_run_and_a_column(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(SYSTEM)
    fields: dict[str, Any] = {"task.chat": True, "lengths": [300], "depths": [0.5], "repeats": 1, "max_new_tokens": 2}
    runs = [
        kvbench.evaluate(tmp_path, policies="full", **fields, **{"model.system_prompt": system})[0]
        for system in (None, "Be brief.")
    ]
    plain, other = (run.samples[0].prompt_tokens for run in runs)
    assert other == plain + len("[system]Be brief.")
    assert runs[0].run_id != runs[1].run_id
    assert "generation.system_prompt" in runs[1].naming.changed
    with pytest.raises(ValueError, match=r"^model\.system_prompt"):
        kvbench.evaluate(tmp_path, policies="full", **fields, **{"model.system_prompt": " "})


def test_a_prompt_that_just_fits_is_taken_and_one_more_token_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    maker = PromptMaker(tokenizer, Given(), max_positions=100)
    assert len(maker.make(example("a" * 89)).ids) == 90  # with <s>; ten are left for the answer
    with pytest.raises(UsageError, match=r"needs 101 positions .*the model's maximum is 100"):
        maker.make(example("a" * 90))


def test_middle_truncation_keeps_both_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    maker = PromptMaker(tokenizer, Given(truncation="middle"), max_positions=200, max_prompt_tokens=20)
    # 20 tokens: <s> and nine characters, then the last ten characters
    assert text(tokenizer, maker, example("start" + "." * 60 + "end")) == "<s>start...." + ".......end"


@pytest.mark.parametrize("template", [None, "<s>[USER] {{ messages[0].content }} [MODEL]"])
def test_a_prompt_cut_on_the_left_keeps_bos_and_the_opening_of_the_template(
    tokenizer: PreTrainedTokenizerBase, template: str | None
) -> None:
    tokenizer.chat_template = template
    words = " ".join(f"{n:03d}" for n in range(60))
    opening, closing = ("[USER] ", " [MODEL]") if template else ("", "")
    kept = words[-(100 - 10 - len(f"B{opening}{closing}")) :]
    given = Given(truncation="left", chat=True)
    assert text(tokenizer, PromptMaker(tokenizer, given, 100), example(words)) == f"<s>{opening}{kept}{closing}"
    limited = PromptMaker(tokenizer, given, None, max_prompt_tokens=90)
    assert text(tokenizer, limited, example(words)) == f"<s>{opening}{kept}{closing}"
    assert LmEval.cuts_bos, "as lm-eval does"


def test_an_answer_ends_before_the_first_stop_string(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer.encode(" 42 END\nmore", add_special_tokens=False)
    assert Ending(tokenizer).text(tokens) == " 42 END\nmore"
    assert Ending(tokenizer, ("\n", "END")).text(tokens) == " 42 "
    assert Ending(tokenizer, ("\n",)).text([*tokens[:3], 1]) == " 42"  # the end token is no text


def test_generation_stops_once_the_text_holds_a_stop_string(tokenizer: PreTrainedTokenizerBase) -> None:
    stopped = Ending(tokenizer, ("END",)).test
    tokens = tokenizer.encode("an END", add_special_tokens=False)
    assert [stopped(tokens[:n]) for n in range(1, len(tokens) + 1)] == [False] * 5 + [True]
    assert Ending(tokenizer).test is None


@pytest.mark.parametrize(("configured", "expected"), [(None, [1]), (1, [1]), (7, [1, 7]), ([7, 9], [1, 7, 9])])
def test_every_end_token_of_the_generation_config_stops(
    tokenizer: PreTrainedTokenizerBase, configured: int | list[int] | None, expected: list[int]
) -> None:
    generation = GenerationConfig(eos_token_id=configured)
    assert end_tokens(generation, tokenizer) == expected


def test_an_end_text_stops_by_its_last_token(tokenizer: PreTrainedTokenizerBase) -> None:
    newline = tokenizer.encode("a\n", add_special_tokens=False)[-1]
    assert end_tokens(None, tokenizer, ("\n",)) == sorted([1, newline])
    assert end_tokens(None, tokenizer, ("a\n",)) == sorted([1, newline])


def test_in_a_suite_each_task_uses_its_own_protocol(tokenizer: PreTrainedTokenizerBase) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mixed(Given):
        def task_of(self, example: Example) -> Task:
            return Given(chat=bool(example.metadata["chat"]))

    tokenizer.chat_template = TEMPLATE
    maker = PromptMaker(tokenizer, Mixed(), 100)
    chats = [Example(0, "Q", ("x",), max_new_tokens=1, metadata={"chat": chat}) for chat in (True, False)]
    assert [text(tokenizer, maker, given) for given in chats] == ["<s>[Q]>", "<s>Q"]


# --- a context and its question ---------------------------------------------------------------------------------------


def merging(*merges: tuple[str, str]) -> PreTrainedTokenizerBase:
    """Characters, and a token more for each pair that always becomes one."""
    letters = ["<s>", *sorted({*"abcdefghijklmnopqrstuvwxyz .?\n[]>"}), *(a + b for a, b in merges)]
    made = RawTokenizer(BPE({letter: i for i, letter in enumerate(letters)}, merges=list(merges)))
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")


def apart(tokenizer: PreTrainedTokenizerBase, context: str, question: str) -> tuple[Prompt, list[str]]:
    """The prompt made of both, and the texts of its two parts."""
    task = Given(chat=tokenizer.chat_template is not None)
    given = replace(example(context + question, prefix=" a"), question=question)
    made = PromptMaker(tokenizer, task, 300, compress="context").make(given)
    assert made.ids.tolist() == PromptMaker(tokenizer, task, 300).make(given).ids.tolist()  # no token is another one
    ids, n = made.ids.tolist(), made.context_tokens
    told = PromptMaker(tokenizer, task, 300, needs_question=True).make(
        given
    )  # the question's place in a prompt compressed whole
    assert (told.question, told.context_tokens, told.length) == (n, None, len(ids))
    return made, [str(tokenizer.decode(part)) for part in (ids[:n], ids[n:])]


def test_the_question_begins_with_its_first_token(tokenizer: PreTrainedTokenizerBase) -> None:
    made, parts = apart(tokenizer, "The mill is red.\n", "Which colour?")
    assert parts == ["<s>The mill is red.\n", "Which colour? a"]
    assert (made.length, made.lengths) == (18, {18: 0})  # <s> and 17 characters


def test_a_token_that_reaches_over_both_belongs_to_the_question() -> None:
    tokenizer = merging((".", "\n"), ("\n", "\n"))
    assert apart(tokenizer, "red.", "\nwho?")[1] == ["<s>red", ".\nwho? a"]
    assert apart(tokenizer, "red.\n", "who?")[1] == ["<s>red.\n", "who? a"]
    assert apart(tokenizer, "red\n", "\nwho?")[1] == ["<s>red", "\n\nwho? a"]


def test_questions_about_one_context_share_its_hash_and_others_do_not(tokenizer: PreTrainedTokenizerBase) -> None:
    first, second = (apart(tokenizer, "The mill is red. ", question)[0] for question in ("Who?", "Whose mill?"))
    other = apart(tokenizer, "The mill is rex. ", "Who?")[0]
    assert first.context_hash == second.context_hash != other.context_hash
    assert PromptMaker(tokenizer, Given(), 300).make(example("The mill")).context_hash is None


def test_the_middle_is_cut_out_of_the_context(tokenizer: PreTrainedTokenizerBase) -> None:
    maker = PromptMaker(tokenizer, Given(truncation="middle"), 300, 20, compress="context")
    made = maker.make(replace(example("start" + "." * 60 + "Who?"), question="Who?"))
    assert str(tokenizer.decode(made.ids[: made.context_tokens].tolist())) == "<s>start...." + "......"
    with pytest.raises(UsageError, match=r"the beginning of the question of example 0 is unknown \(it was cut"):
        maker.make(replace(example("start" + "." * 60 + "Who was that?"), question="Who was that?"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "example 0 of task given has no separate question: use compress=prompt"),
        ({"question": " \n"}, "has no separate question"),
        ({"question": "The mill. Who?"}, "there is no text before the question"),
        ({"question": "Who?", "target": "me"}, "has none (it scores given tokens)"),
        ({"question": "Who?", "reading": Reading()}, "has none"),
        ({"rated": (("a", "b"),)}, "has none"),
    ],
)
def test_what_has_no_question_apart_is_refused(
    tokenizer: PreTrainedTokenizerBase, given: dict[str, Any], said: str
) -> None:
    asked = replace(example("The mill. Who?"), **given)
    with pytest.raises(UsageError) as caught:
        PromptMaker(tokenizer, Given(), 300, compress="context").make(asked)
    assert said in str(caught.value)
    assert PromptMaker(tokenizer, Given(), 300, needs_question=True).make(asked).question is None


def test_a_reference_that_every_output_contains_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    maker = PromptMaker(tokenizer, Given(), 100)
    with pytest.raises(UsageError, match=r"example 0: reference: '' in \['red', ''\] is an empty text"):
        maker.make(replace(example("Which?"), references=("red", "")))


@pytest.mark.parametrize(
    "fields",
    [
        {"tasks": "niah", "lengths": (400,)},
        {"tasks": "niah", "lengths": (400,), "divergence": True},
        {"tasks": "niah_dictated", "lengths": (400,)},
        {"tasks": "perplexity", "data_dir": "text.txt", "length": 64},
    ],
)
def test_a_tokenizer_of_another_model_is_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("one two three " * 40)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model.resize_token_embeddings(7)
    with pytest.raises(UsageError, match=r"makes token \d+, and the vocabulary of the model has 7 tokens"):
        kvbench.evaluate(model, tokenizer=tokenizer, policies="full", limit=1, **fields)
