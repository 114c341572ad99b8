"""`kvbench.ask`, and what results and caches show in Python."""

from pathlib import Path
from statistics import stdev

import pytest
import torch
from plotted_runs import sample, write_run
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvbench
from kvbench.models.prompts import PromptMaker
from kvbench.models.shared import shared_texts
from kvbench.tasks.task import Example, Shared

POCKET = Path(kvbench.__path__[0]) / "pocket"


def test_one_context_is_compressed_once_and_every_question_is_answered_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(POCKET), AutoTokenizer.from_pretrained(POCKET)
    filler = "They did not wipe the carrot. " * 20
    context = f"The secret number of red-fox is 4821973. {filler}The secret number of old-mill is 1234567. {filler}"
    asked = [f"Question: What is the secret number of {name}?\nAnswer: The secret number of {name} is"
             for name in ("red-fox", "old-mill")]  # fmt: skip
    calls: list[int] = []
    forward = type(model).forward

    def counted(self: object, *args: object, **fields: object) -> object:
        ids = fields.get("input_ids", args[0] if args else None)
        calls.append(ids.numel() if isinstance(ids, torch.Tensor) else 0)
        return forward(self, *args, **fields)

    monkeypatch.setattr(type(model), "forward", counted)
    found = kvbench.ask(model, tokenizer, context, questions=asked, policy="full", max_new_tokens=9)
    assert ["4821973" in found[0], "1234567" in found[1]] == [True, True]
    length = len(tokenizer(context).input_ids)
    assert sum(calls) < 1.5 * length  # one prefill of the context, not two
    assert len(kvbench.ask("pocket", None, context, questions=asked[0], budget=32, max_new_tokens=3)) == 1
    for wrong in ({"questions": []}, {"questions": [" "]}):
        with pytest.raises(ValueError, match="ask needs a context and questions"):
            kvbench.ask("pocket", None, context, **wrong)


def test_arguments_of_the_chat_template_reach_questions_that_share_a_context() -> None:
    tokenizer = AutoTokenizer.from_pretrained(POCKET)
    tokenizer.chat_template = "{{ messages[-1].content }}{% if not enable_thinking %}<no thoughts>{% endif %}"
    example = Example(0, "text question", (), 3, question=" question", shared=Shared(0))
    assert shared_texts(tokenizer, example, Shared(0), True, {"enable_thinking": False})[1] == " question<no thoughts>"
    task = kvbench.api.ask.Questions(context="text", questions=("q",), chat_template_args={"enable_thinking": True})
    (made,) = (PromptMaker(tokenizer, task, None, compress="context").make(one) for one in task.examples(None, 0))
    assert "thoughts" not in tokenizer.decode(made.ids)


def test_samples_and_seeds_are_data_frames_and_a_cache_has_a_repr(tmp_path: Path) -> None:
    scores = {0: [1.0, 1.0, 0.0, 1.0], 1: [1.0, 0.0, 0.0, 1.0], 2: [0.0, 0.0, 0.0, 1.0]}
    for seed, values in scores.items():
        write_run(tmp_path, "tova", [sample(i, v, depth=0.5) for i, v in enumerate(values)], seed=seed)
    results = kvbench.load_results(tmp_path)
    table = results.samples_df()
    assert (len(table), set(table["depth"]), table["score"].mean()) == (12, {0.5}, 0.5)
    assert {"run_id", "policy", "budget", "output", "cache_bytes"} <= set(table)
    (row,) = results.over_seeds()
    assert (row.policy, row.n_seeds, row.n, row.score) == ("tova", 3, 4, 0.5)
    assert row.seed_sd == pytest.approx(stdev([0.75, 0.5, 0.25]))
    shown = results._repr_mimebundle_()
    assert "tova" in shown["text/plain"]
    assert "<table" in shown["text/html"]
    model = AutoModelForCausalLM.from_pretrained(POCKET)
    model.set_attn_implementation("kvbench")
    cache = kvbench.KVCache(model.config, kvbench.make_policy("snapkv", 40))
    assert repr(cache).startswith("<KVCache snapkv, budget 40: 0.0 of 0 tokens per KV head")
    model(torch.arange(100)[None] % 50, past_key_values=cache)
    assert repr(cache).startswith("<KVCache snapkv, budget 40: 40.0 of 100 tokens per KV head, 0.")
