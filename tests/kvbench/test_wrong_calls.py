"""Wrong arguments in Python: each is one ValueError that names the argument, its value and what is allowed."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kv_models import prompt, tiny

import kvbench
from kvbench import KVCache, evaluate, generate, make_policy
from kvbench.cache.hook import prepare
from kvbench.errors import ConfigError
from kvbench.tools.diagnose import runs_of

MODEL, IDS = tiny(dtype=torch.float32), torch.tensor([prompt(20)])
POLICY = make_policy("snapkv", 36)
GENERATE: list[tuple[dict[str, Any], str]] = [
    ({"model": "pocket"}, "model must be a loaded model of transformers, got a str"),
    ({"policy": "snapkv"}, "policy must be a Policy, such as make_policy"),
    ({"prompt": IDS[0]}, r"prompt must be .* token ids \[B,T\].* got 'int64 \[20\]'"),
    ({"prompt": IDS.tolist()}, "prompt must be a text or token ids .* got a list"),
    ({"prompt": IDS.float()}, "got 'float32"),
    ({"prompt": IDS[:, :0]}, "of at least one token"),
    ({"prompt": IDS + 1000}, "token ids from 0 to 511"),
    ({"prompt": "text"}, "tokenizer= is missing, a text needs it"),
    ({"prompt": "text", "tokenizer": "gpt2"}, "tokenizer must be a tokenizer of transformers, got a str"),
    ({"stop": "end"}, "stop must be a list of strings"),
    ({"attention_mask": torch.ones(1, 3)}, r"attention_mask must be a tensor \[B,T\] .* got \[1, 3\]"),
    ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, got 0"),
    ({"min_new_tokens": -1}, "min_new_tokens must be a whole number of at least 0"),
    ({"context_tokens": 1.5}, "context_tokens must be a whole number"),
    ({"seed": -1}, "seed must be a whole number of at least 0"),
    ({"temperature": float("nan")}, "temperature must be a number of at least 0, got nan"),
]


@pytest.mark.parametrize(("wrong", "sentence"), GENERATE)
def test_generate_names_the_wrong_argument(wrong: dict[str, Any], sentence: str) -> None:
    given = {"model": MODEL, "prompt": IDS, "policy": POLICY, "max_new_tokens": 2} | wrong
    with pytest.raises(ConfigError if "tokenizer=" not in sentence else ValueError, match=sentence):
        generate(given.pop("model"), given.pop("prompt"), given.pop("policy"), **given)


def test_numbers_of_numpy_are_numbers() -> None:
    expected = generate(MODEL, IDS, make_policy("tova", 12), max_new_tokens=3).tokens
    policy = make_policy("tova", np.int64(12), block=None)
    assert generate(MODEL, IDS, policy, max_new_tokens=np.int32(3), seed=np.uint8(0)).tokens == expected
    assert type(policy.budget) is int
    assert make_policy("snapkv", np.float32(0.25), window=np.int16(8)).budget == 0.25
    assert make_policy("fp8", key_scales=[np.float64(1), np.float32(2)]).store.key_scales == [1.0, 2.0]
    found = evaluate("pocket", policies="tova", budgets=np.array([32, 64]), tasks="niah", limit=np.int64(1))
    assert found.to_pandas()["budget"].tolist() == [32, 64]


def test_a_text_beyond_the_model_s_positions_is_generated_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="2049 tokens, but the model has 2048 positions"):
        generate(MODEL, IDS.repeat(1, 103)[:, :2047], make_policy("streamingllm", 40), max_new_tokens=2)


def converted(cache: KVCache) -> None:
    model = copy.deepcopy(MODEL)
    model(IDS, past_key_values=cache)
    model.to(torch.bfloat16)(IDS[:, :1], past_key_values=cache)


CACHES: list[tuple[Callable[..., object], str]] = [
    (lambda _: KVCache(MODEL, POLICY), "config must be a model's configuration.* got a LlamaForCausalLM"),
    (lambda _: KVCache(POLICY, MODEL.config), "config must be a model's configuration.* got a Policy"),
    (lambda _: KVCache(MODEL.config, "snapkv"), "policy must be a Policy"),
    (lambda _: evaluate(MODEL, "folder", policies="full"), "tokenizer= must be a tokenizer of transformers, got a str"),
    (converted, r"holds numbers in torch.float32, but the model computes in torch.bfloat16"),
    (
        lambda held: MODEL.generate(IDS, past_key_values=held, use_cache=False, max_new_tokens=3),
        "do not set use_cache=False",
    ),
    (
        lambda _: MODEL(IDS, past_key_values=KVCache(prepared(kv_heads=4).config, POLICY)),
        r"another model's configuration \(num_key_value_heads=4, the model has 2\)",
    ),
    (
        lambda _: MODEL(IDS, past_key_values=KVCache(prepared(layers=1).config, POLICY)),
        r"another model's configuration \(num_hidden_layers=1, the model has 2\)",
    ),
]


def prepared(**sizes: int) -> Any:
    return prepare(tiny(dtype=torch.float32, **sizes))


@pytest.mark.parametrize(("call", "sentence"), CACHES)
def test_a_cache_that_does_not_fit_is_refused(call: Callable[..., object], sentence: str) -> None:
    MODEL.set_attn_implementation("kvbench")
    with pytest.raises(ValueError, match=sentence):
        call(KVCache(MODEL.config, POLICY))


WRONG_CALLS: dict[str, Callable[[], object]] = {
    "policy must be a name, got null": lambda: make_policy(None, 64),
    "config_dir=/nowhere is not a folder": lambda: make_policy("snapkv", 64, config_dir="/nowhere"),
    "config_dir=/none is not a folder": lambda: kvbench.evaluate("pocket", policies="full", config_dir="/none"),
    "config_dir=/no is not a folder": lambda: runs_of([], Path("/no")),
    "folder must be a folder of runs, got null": lambda: kvbench.load_results(None),
    "ask needs a context and questions": lambda: kvbench.ask("pocket", context="a b", questions=None),
    "max_new_tokens must be a whole": lambda: kvbench.ask("pocket", context="a", questions="b", max_new_tokens=0),
    "across must be task or budget": lambda: kvbench.Results([], Path()).pivot("policy"),
    "a prompt's length must be a whole": lambda: KVCache(prepared().config, make_policy("full"), prompt_length=0),
    "a LlamaModel has no head that predicts tokens: load it with AutoModelForCausalLM": lambda: kvbench.generate(
        prepared().model, torch.tensor([[1]]), make_policy("full")
    ),
}


@pytest.mark.parametrize("sentence", WRONG_CALLS)
def test_a_wrong_call_is_one_sentence(sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        WRONG_CALLS[sentence]()


@pytest.mark.parametrize(
    ("call", "arguments", "words"),
    [
        (generate, (MODEL, "tokenizer", "text"), "generate: multiple values for argument 'policy'.*, prompt, policy,"),
        (
            evaluate,
            (MODEL, "tokenizer", ["snapkv"]),
            r"too many positional .* evaluate\(model, tokenizer, \*, \.\.\.\)",
        ),
        (
            kvbench.ask,
            (MODEL, "tokenizer", "text", "why?"),
            r"too many positional .* ask\(model, tokenizer, context, \*",
        ),
    ],
)
def test_a_call_with_wrong_positions_is_answered_with_the_order(
    call: Callable[..., Any], arguments: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        call(*arguments, policy="snapkv")
