"""Questions that share a context, alone after it or as turns of a conversation, against transformers' own cache."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parameters import few_fast
from shared_context_files import ROWS, write
from small_cells import HOW
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvbench
from kvbench import BudgetError
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.compute import compute_runs
from kvbench.models.prompts import PromptMaker
from kvbench.tasks.scbench.task import SCBench
from kvbench.tasks.task import PlainTokenizer
from kvbench.tools.diagnose import runs_of

POCKET = Path(kvbench.__file__).parent / "pocket"
NEW, BUDGET, CONTEXTS, TURNS = 6, 40, 2, 3
MODES = ("multi_turn", "scdq", "own")
Line = dict[str, Any]
Run = Callable[..., dict[str, list[Line]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """The samples of some policies on two contexts of SCBench's form, three turns each."""
    data = tmp_path / "data"  # apart from `out`: the contents of data_dir are part of a run's identity
    data.mkdir()
    write(data, "kv", contexts=CONTEXTS)

    def samples(mode: str, *given: str, policies: str = "full", out: str = "runs") -> Any:
        asked = ["task=scbench/kv", f"task.data_dir={data}", f"out={tmp_path / out}", "limit=null", "device=cpu"]
        asked += ["task.history=own" if mode == "own" else f"task.mode={mode}", f"task.max_new_tokens={NEW}"]
        for error in compute_runs(runs_of([*asked, f"budget={BUDGET}", f"policy={policies}", *given])):
            if error is not None:
                raise error
        files = {file.parent.name.split("-")[1]: file for file in (tmp_path / out).glob("*/samples.jsonl")}
        return {policy: [*map(json.loads, file.read_text().splitlines())] for policy, file in files.items()}

    return samples


@torch.inference_mode()
def by_hand(mode: str) -> list[str]:
    """The answers of transformers' own cache to the same file: each text tokenised alone, as SCBench's code does."""
    tokenizer, model = AutoTokenizer.from_pretrained(POCKET), AutoModelForCausalLM.from_pretrained(POCKET).eval()
    begin = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    texts: list[str] = []
    unread: list[int] = []

    def read(cache: DynamicCache, text: str | list[int], special: bool = False) -> torch.Tensor:
        ids = tokenizer.encode(text, add_special_tokens=special) if isinstance(text, str) else text
        return model(torch.tensor([ids]), past_key_values=cache).logits[:, -1]

    def written(cache: DynamicCache, logits: torch.Tensor) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < NEW and (token := int(logits.argmax())) != tokenizer.eos_token_id:
            tokens.append(token)
            if len(tokens) < NEW:
                logits = read(cache, [token])
        texts.append(tokenizer.decode(tokens, skip_special_tokens=True))
        return tokens

    for number in range(CONTEXTS):
        turns, cache = ROWS["kv"]["multi_turns"], DynamicCache()
        context = begin + ROWS["kv"]["context"] + (f" {number}" if number else "")
        if mode == "scdq":
            read(cache, context, special=True)
        for turn, asked in enumerate(turns):
            if mode == "scdq":
                alone = copy.deepcopy(cache)
                written(alone, read(alone, asked["input"]))
                continue
            if not turn:
                logits = read(cache, f"{context}\n\n{asked['input']}", special=True)
            elif mode == "own":
                logits = read(
                    cache,
                    [*unread, tokenizer.eos_token_id, *tokenizer.encode(asked["input"], add_special_tokens=False)],
                )
            else:
                logits = read(cache, f"{turns[turn - 1]['answer']}\n\n{asked['input']}")
            held = cache.get_seq_length()
            tokens = written(cache if mode == "own" else copy.deepcopy(cache), logits)
            unread = tokens[cache.get_seq_length() - held :]
    return texts


@pytest.mark.parametrize("mode", MODES)
def test_full_answers_as_a_loop_over_transformers_cache_and_others_keep_their_budget(mode: str, run: Run) -> None:
    found, expected = run(mode, policies="full,snapkv,h2o"), by_hand(mode)
    assert [line["output"] for line in found.pop("full")] == expected
    assert len(set(expected)) > TURNS
    for policy, lines in found.items():
        for line in lines:
            beside = line["prompt_tokens"] - line["context_tokens"] if mode == "scdq" else 0
            grown = beside + line["decode_steps"] if policy == "snapkv" else 0
            assert {kept for layer in line["kept_tokens"] for kept in layer} == {BUDGET + grown}
            assert line["error"] is None


@pytest.mark.parametrize("mode", few_fast(MODES, ("own",), pytest.mark.slow("runs three sweeps in every mode")))
def test_turns_are_equal_one_by_one_and_after_a_kill(mode: str, run: Run, tmp_path: Path) -> None:
    whole = run(mode, policies="snapkv,h2o")
    alone = run(mode, "engine.rows=1", policies="snapkv,h2o", out="alone")
    again = alone["snapkv"][1]["recomputed_tokens"]
    assert again == (alone["snapkv"][1]["context_tokens"] if mode == "scdq" else 0)
    for file in (tmp_path / "runs").glob("*/samples.jsonl"):  # killed in the second conversation
        file.write_text("".join(file.read_text().splitlines(keepends=True)[: TURNS + 1]))
        (file.parent / "metrics.json").unlink()
    continued = run(mode, policies="snapkv,h2o")
    for policy, lines in continued.items():
        assert lines[TURNS + 1]["recomputed_tokens"] > 0
        assert [line["recomputed_tokens"] for line in (*lines[: TURNS + 1], *lines[TURNS + 2 :])] == [0] * 5
        for other in (whole[policy], alone[policy]):
            assert list(map(result, lines)) == list(map(result, other))


def test_a_turn_after_a_failed_answer_of_the_model_fails_too_and_is_computed_by_the_next_command(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, admit, calls = run("own", out="whole"), DecodeBatch.admit, []

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # the second turn of the first conversation
            raise BudgetError("layer 0 holds 41 of 40")
        return admit(*arguments)

    monkeypatch.setattr(DecodeBatch, "admit", failing)
    errors = [line["error"] for line in run("own")["full"]]
    earlier = "HistoryError: the answer of an earlier turn failed, so this turn has no history"
    assert errors == [None, "BudgetError: layer 0 holds 41 of 40", earlier, None, None, None]
    assert list(map(result, run("own")["full"])) == list(map(result, whole["full"]))


def result(line: Line) -> Line:
    """A sample but for how it was computed."""
    return {k: v for k, v in line.items() if k not in {*HOW, "recomputed_tokens"}}


def test_a_policy_that_takes_no_next_prompt_is_refused_in_one_sentence(run: Run) -> None:
    pytest.importorskip("kvpress", reason="kvpress is not installed: pip install --no-deps kvpress cachetools")
    for policy, said in {
        "gemfilter policy.pre_pass.layer=1": "rewrites a prompt before it is read, so none can follow it",
        "snapkv_kivi_g8_r8": "stores a prompt in a compressed form from which no token can be evicted",
        "kvpress/KnormPress": "compresses a cache of its own, and only one prompt: use mode=scdq",
        "d2o_released": "and in a conversation the next prompt follows",
    }.items():
        name, *fields = policy.split()
        with pytest.raises(ValueError, match=rf"^[^\n]*{said}[^\n]*$"):
            run("multi_turn", *fields, policies=name)


def task(folder: Path, name: str = "kv", **fields: Any) -> SCBench:
    return SCBench(subset=name, hub="microsoft/SCBench", revision="main", data_dir=str(folder), **fields)


CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FIRST = "<s><user>It rained and rained.\n\nPaper 1?</s><assistant>"


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("multi_turn", f"{FIRST}It rained</s><user>2?</s><assistant>This paper"),
        ("own", f"{FIRST}</s><user>2?</s><assistant>This paper"),
        ("scdq", "<s><user>It rained and rained.2?</s><assistant>"),
    ],
)
def test_in_a_chat_template_the_history_is_the_assistants_turn(
    mode: str, expected: str, tiny_model: Path, tmp_path: Path
) -> None:
    write(tmp_path, "summary")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = CHAT
    fields = {"history": "own"} if mode == "own" else {"mode": mode}
    asked = task(tmp_path, "summary", **fields)
    _, second = asked.examples(PlainTokenizer(tokenizer), 0)
    found = PromptMaker(tokenizer, asked, 1024).make(second)
    assert tokenizer.decode(found.ids.tolist()) == expected


def test_a_context_that_is_too_long_loses_the_same_middle_for_every_question(tiny_model: Path, tmp_path: Path) -> None:
    write(tmp_path, "kv")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for mode in ("scdq", "multi_turn"):
        asked = task(tmp_path, mode=mode)
        found = [
            PromptMaker(tokenizer, asked, 100_000, 60).make(e) for e in asked.examples(PlainTokenizer(tokenizer), 0)
        ]
        assert {prompt.context_tokens or prompt.turns[0] for prompt in found} == {60}
        assert len({prompt.context_hash for prompt in found}) == 1
        assert tokenizer.decode(found[0].ids[:30].tolist()) == "<s>Extract the value correspondi"
