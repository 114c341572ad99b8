"""What is timed: the tokens that generation writes, and the bytes that are held, ours and rivals'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench_model import prompt
from kv_models import tiny
from transformers import DynamicCache, StaticCache

from kvbench import make_policy
from kvbench.cache.hook import prepare
from kvbench.inference.generate import generate_tokens
from kvbench.terminal.errors import UsageError
from kvbench.tools.bench import rivals
from kvbench.tools.bench.generation import RECORDED, Job, Run, measure
from kvbench.tools.bench.providers import held_bytes, ours, tensors_in


@pytest.mark.parametrize("slug", ["full", "snapkv", "h2o", "d2o", "kivi"])
def test_timed_steps_write_the_tokens_that_generation_writes(slug: str) -> None:
    model, ids = tiny(), prompt(100)
    budget = None if slug in ("full", "kivi") else 64
    expected = generate_tokens(prepare(model), ids, make_policy(slug, budget), max_new_tokens=6).tokens[0]
    run = Run(model, ours(slug, budget), ids)
    run.prefill()
    got = [int(run.token)]
    for _ in range(5):
        run.decode(1)
        got.append(int(run.token))
    assert got == expected


def test_transformers_own_caches_write_what_the_full_cache_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a compiled model the first steps are not timed; what compiling makes of a step is PyTorch's to test."""
    model, ids, written, held = tiny(), prompt(50), {}, {}
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    for name in ("transformers_sdpa", "transformers_compiled", "full"):
        run = Run(model, ours(name, None) if name == "full" else rivals.provider(name, None, 50), ids, new=4)
        run.prefill()
        assert len(run.decode(4 if run.provider.compiled else 4 + RECORDED)) >= 4
        written[name], held[name] = int(run.token), run.held_bytes
    assert len(set(written.values())) == 1
    slots = 50 + 4 + RECORDED
    assert held["transformers_sdpa"] == 2 * 2 * slots * 2 * 8 * 8  # keys and values, layers, heads, dim, float64
    assert held["transformers_compiled"] == held["transformers_sdpa"] + 2 * 8  # and a length per layer


def test_each_cell_of_a_compiled_model_compiles_the_steps_of_its_own_cache_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch makes sizes that change into variables, and stops compiling a function after eight of them."""
    done: list[int | str] = []

    def compiled(function: Any, *, dynamic: bool, **_: Any) -> Any:
        def step(*given: Any, past_key_values: StaticCache, **named: Any) -> Any:
            done.append(past_key_values.layers[0].max_cache_len)
            return function(*given, past_key_values=past_key_values, **named)

        assert not dynamic
        return step

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "reset", lambda: done.append("reset"))
    for length in (40, 50):
        done.clear()
        measure(tiny(), rivals.provider("transformers_compiled", None, length), Job(prompt=length, new=4, timed=4))
        steps = [size for size in done if size != "reset"]
        assert steps == [length + 4 + RECORDED] * (4 + RECORDED)
        assert "reset" in done[: done.index(steps[0])]


@pytest.mark.parametrize(("slug", "slots", "spare"), [("snapkv", 64 + 10, 6), ("cake", 64 + 1, 1)])
def test_a_cache_makes_no_room_for_more_tokens_than_the_answer_has(slug: str, slots: int, spare: int) -> None:
    """One of CAKE's slots is empty after each step: the next token goes there."""
    found = measure(tiny(), ours(slug, 64), Job(prompt=100, new=10, timed=4))
    per_slot = 2 * 2 * (2 * 8 * 8 + 4)  # layers, heads, keys and values of 8 float64, the position
    assert found["spare_bytes"] == per_slot * spare
    assert found["held_bytes"] - per_slot * slots < per_slot * 40, "what CAKE remembers of its window, and no slots"
    if slug == "snapkv":
        assert found["held_bytes"] == per_slot * slots


def test_bytes_are_those_of_the_tensors_inside_wrappers_containers_and_shared_storages() -> None:
    codes, scale = torch.zeros(10, dtype=torch.uint8), torch.zeros(3)
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4), 0)
    vars(cache.layers[0])["extra"] = (codes, {"scale": scale, "bits": 2}, codes[:5])
    assert held_bytes(cache) == 2 * 2 * 5 * 4 * 4 + 10 + 12
    assert len(list(tensors_in([codes, {"a": (scale, None)}]))) == 2


@pytest.mark.parametrize(("slug", "why"), [("kvzip", "more than one plain forward pass"), ("finch", "for a question")])
def test_what_random_prompts_cannot_time_is_refused(slug: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"policies={slug} cannot be timed here: .*{why}"):
        ours(slug, 64)
