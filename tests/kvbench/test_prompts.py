"""What the model reads: order of the strings, one BOS, cutting, and where an answer ends."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from kvbench.models.prompts import SEAM, PromptMaker, answer, end_tokens, stop_test
from kvbench.tasks.task import Example, Task, Tokenizer
from kvbench.terminal.errors import UsageError

TEMPLATE = "<s>[{% for m in messages %}{{ m.content }}{% endfor %}]{% if add_generation_prompt %}>{% endif %}"


@dataclass(frozen=True, kw_only=True)
class Given(Task):
    """A task with no examples of its own: prompts are made from those of the test."""

    name: str = "given"

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        return iter(())

    def score(self, output: str, example: Example) -> float:
        return 0.0


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


def test_the_chat_template_wraps_the_prompt_but_not_the_answer_prefix(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = TEMPLATE
    maker = PromptMaker(tokenizer, Given(chat=True), 100)
    assert text(tokenizer, maker, example("Question?", prefix="Answer:")) == "<s>[Question?]>Answer:"


def test_the_template_is_left_out_where_the_task_does_not_chat(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = TEMPLATE
    assert text(tokenizer, PromptMaker(tokenizer, Given(chat=False), 100), example("Question?")) == "<s>Question?"


def test_a_model_without_a_template_reads_the_plain_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    assert text(tokenizer, PromptMaker(tokenizer, Given(chat=True), 100), example("Question?")) == "<s>Question?"


def test_a_prompt_that_just_fits_is_taken_and_one_more_token_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    maker = PromptMaker(tokenizer, Given(), max_positions=100)
    assert len(maker.make(example("a" * 89)).ids) == 90  # with <s>; ten are left for the answer
    with pytest.raises(UsageError, match=r"needs 101 positions .*the model's maximum is 100"):
        maker.make(example("a" * 90))


def test_middle_truncation_keeps_both_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    maker = PromptMaker(tokenizer, Given(truncation="middle"), max_positions=200, max_prompt_tokens=20)
    # 20 tokens: <s> and nine characters, then the last ten characters
    assert text(tokenizer, maker, example("start" + "." * 60 + "end")) == "<s>start...." + ".......end"


def test_without_a_given_limit_the_middle_is_cut_to_the_models_positions(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = TEMPLATE
    maker = PromptMaker(tokenizer, Given(truncation="middle", chat=True), max_positions=100)
    got = maker.make(example("a" * 500 + "end", new=10, prefix="!"))
    assert len(got.ids) <= 90
    assert len(got.ids) >= 90 - SEAM - 2
    assert str(tokenizer.decode(got.ids.tolist())).endswith("end]>!")


def test_a_short_prompt_is_not_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    maker = PromptMaker(tokenizer, Given(truncation="middle"), max_positions=100)
    assert text(tokenizer, maker, example("short")) == "<s>short"


def test_equal_hashes_mean_equal_text(tokenizer: PreTrainedTokenizerBase) -> None:
    maker = PromptMaker(tokenizer, Given(), 100)
    assert maker.make(example("a")).hash == maker.make(example("a")).hash != maker.make(example("b")).hash


def test_an_answer_ends_before_the_first_stop_string(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer.encode(" 42 END\nmore", add_special_tokens=False)
    assert answer(tokenizer, tokens, ()) == " 42 END\nmore"
    assert answer(tokenizer, tokens, ("\n", "END")) == " 42 "
    assert answer(tokenizer, [*tokens[:3], 1], ("\n",)) == " 42"  # the end token is no text


def test_generation_stops_once_the_text_holds_a_stop_string(tokenizer: PreTrainedTokenizerBase) -> None:
    stopped = stop_test(tokenizer, ("END",))
    assert stopped is not None
    tokens = tokenizer.encode("an END", add_special_tokens=False)
    assert [stopped(tokens[:n]) for n in range(1, len(tokens) + 1)] == [False] * 5 + [True]
    assert stop_test(tokenizer, ()) is None


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


def test_in_a_suite_the_task_that_asks_decides(tokenizer: PreTrainedTokenizerBase) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mixed(Given):
        def asking(self, example: Example) -> Task:
            return Given(chat=bool(example.metadata["chat"]))

    tokenizer.chat_template = TEMPLATE
    maker = PromptMaker(tokenizer, Mixed(), 100)
    chats = [Example(0, "Q", ("x",), max_new_tokens=1, metadata={"chat": chat}) for chat in (True, False)]
    assert [text(tokenizer, maker, given) for given in chats] == ["<s>[Q]>", "<s>Q"]
