"""Long answers: what is dictated is decoded and not counted, thinking is not scored, what was cut off is told."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from command_lines import composed
from small_cells import results
from transformers import AutoTokenizer

import kvbench
from kvbench.config.compose import CONF, load
from kvbench.engine.compute import compute_runs
from kvbench.models.answers import Ending, end_tokens
from kvbench.models.prompts import PromptMaker
from kvbench.report.table import results_table
from kvbench.run.run import build_run
from kvbench.run.run_config import Sampling
from kvbench.tasks.lm_eval.task import chat_text
from kvbench.tasks.task import THOUGHTS, Example, Task, Thoughts
from kvbench.tools.diagnose import runs_of


def test_dictated_tokens_are_evicted_while_decoding_and_not_counted(tiny_model: Path, tmp_path: Path) -> None:
    given = [f"model={tiny_model}", "device=cpu", "limit=1", "task=niah_dictated", "task.lengths=[300]"]
    given += ["task.dictate_after=40", "task.max_new_tokens=6", "policy=full,streamingllm", "budget=32"]
    together, alone, whole = (
        list(runs_of([*given, "decode=evict", "every=8", f"out={tmp_path / out}", *fields]))
        for out, fields in (("together", ()), ("alone", ("engine.rows=1",)), ("whole", ("task.dictate_after=null",)))
    )
    assert not any(compute_runs([*together, *alone, *whole]))
    assert [results(cell) for cell in together] == [results(cell) for cell in alone]
    full, streaming = (results(cell) for cell in together)
    for sample, other, undictated in zip(full, streaming, results(whole[0]), strict=True):
        assert sample["output"] == undictated["output"], "the full cache is the same, however it was filled"
        assert sample["prompt_tokens"] <= 41
        assert sample["generated_tokens"] == 6
        fed = undictated["prompt_tokens"] - sample["prompt_tokens"]
        assert fed > 150
        assert sample["decode_steps"] == fed + 6 - 1, (fed, sample["decode_steps"])
        assert other["peak_bytes"] < 0.4 * sample["peak_bytes"], "nothing ever held what was dictated"


@dataclass(frozen=True, kw_only=True)
class Thinking(Task):
    """Everything is a thought."""

    name: str = "thinking"
    chat: bool = True

    def examples(self, tokenizer: object, seed: int, limit: int | None = None) -> Any:
        yield Example(0, "1+1?", ("2",), 4)

    def score(self, output: str, example: Example) -> float:
        return 0.0


def test_a_template_reads_the_task_s_arguments(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking %} Think.{% endif %}"
    (example,) = Thinking().examples(tokenizer, 0)

    def text(task: Task) -> str:
        return str(tokenizer.decode(PromptMaker(tokenizer, task, 300).make(example).ids, skip_special_tokens=True))

    assert text(Thinking(chat_template_args={"enable_thinking": True})) == "1+1? Think."
    assert text(Thinking()) == "1+1?"
    turns = [{"role": "user", "content": "1+1?"}]
    assert chat_text(tokenizer, turns, True, {"enable_thinking": True}) == "1+1? Think.", "as for tasks of lm-eval"


def marks(end: str) -> Thoughts:
    """The marks of a task's thoughts."""
    found = Thinking(think_end=end).thoughts
    assert found is not None
    return found


def test_stop_strings_count_only_after_a_thought(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    special = [
        "<|end|>",
        "[THINK]",
        "[/THINK]",
        "<|channel>",
        "<channel|>",
        "<|channel|>",
        "<|message|>",
        "<|END_THINKING|>",
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": special})

    def told(text: str, mark: str = "</think>", opened: bool = False) -> tuple[str, bool]:
        """The text of the answer, generated token by token until it ends, and whether it ended before EOS."""
        ends = end_tokens(None, tokenizer, ("\n",), ("<|end|>",))
        ending = Ending(tokenizer, ("END",), marks(mark), opened, ends)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        for n in range(1, len(tokens) + 1):
            if ending.reached(tokens[:n]):
                return ending.text(tokens[:n]), True
        return ending.text(tokens), False

    known = [(begin, end) for end, begin in THOUGHTS.items()]
    for begin, end in (("<think>", "</think>"), ("[THINK]", "[/THINK]"), *known):
        thought = f"{begin}a END\n<|end|>b"
        shown = thought.replace("<|end|>", "")
        assert told(thought, end) == (shown, False)
        assert told(f"{thought}{end}\n\nc END d", end) == (f"{shown}{end}\n\nc ", True)
        assert told(f"{thought}{end}\n\nc\nd", end) == (f"{shown}{end}\n\nc\n", True)
        assert told(f"{thought}{end}c<|end|>d", end) == (f"{shown}{end}c", True)
        assert told(f"a END{end}b", end, opened=True) == (f"a END{end}b", False)
    assert told("a END b") == ("a ", True), "without a thought"


def test_an_answer_cut_off_inside_its_thought_is_an_empty_answer(tmp_path: Path) -> None:
    def row(**fields: Any) -> Any:
        fields = {"task.lengths": [200], "task.max_new_tokens": 8, "task.think_end": "</think>", **fields}
        (row,) = kvbench.evaluate("pocket", policies=["full"], tasks=["niah"], limit=4, out=str(tmp_path), **fields)
        return row

    prefix = " The secret {number} of {keys} {is_are}"
    whole, inside, after = (
        row(**{"task.answer_prefix": start + prefix}) for start in ("", " <think>", " <think> 1 </think>")
    )
    assert whole.score > 0.5, "without a mark, the whole output is the answer"
    assert whole.in_thought is None
    assert (inside.score, inside.in_thought) == (0.0, 4)
    assert {(one.answer, bool(one.output), one.in_thought) for one in inside.samples} == {("", True, True)}
    assert "in thought" in results_table([inside]).frame.columns
    assert "in thought" not in results_table([whole]).frame.columns
    assert after.in_thought is None
    thoughts = marks("</think>")
    assert thoughts.opened("question<|assistant|><think>\n")
    assert thoughts.opened("x<think>\n", " Answer:")
    assert not thoughts.opened("what is <think>?", " Answer:")
    assert not thoughts.opened("x<think>\n\n</think>\n\n")
    assert not thoughts.opened("x<think>", " none</think>")
    assert marks("[/THINK]").opened("[THINK]")
    assert marks("<channel|>").opened("<|turn>model\n<|channel>thought\n")
    assert not marks("<channel|>").opened("<|turn>model\n<|channel>thought\n<channel|>")


def test_the_reasoning_experiment_has_each_policy_at_each_budget_with_the_prompt_protected_or_not() -> None:
    params = load(CONF / "experiment/reasoning.yaml")["hydra"]["sweeper"]["params"]
    assert params["budget"] == "512,1024,2048,4096"
    params["budget"] = 512
    grid = product(*([f"{key}={value}" for value in str(values).split(",")] for key, values in params.items()))
    same = ("experiment=reasoning", "task=niah_dictated", "device=cpu")
    runs = {cell.run_id: cell for cell in (build_run(composed(*same, *words)) for words in grid)}
    cells = list(runs.values())
    told = {(c.policy_name, c.budget, c.policy.schedule.protect) for c in cells if c.policy_name != "full"}
    five = ("rkv", "random_attention", "snapkv", "h2o", "streamingllm")
    assert told == {(name, 512, protect) for name in five for protect in ("none", "prompt")}
    assert [c.policy_name for c in cells].count("full") == 1
    assert {c.policy.schedule.every for c in cells if c.policy_name != "full"} == {128}  # full evicts nothing
    assert {(c.samples, c.sampling) for c in cells} == {(4, Sampling(0.6, 0.95))}
