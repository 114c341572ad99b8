"""Decoding of all dense sequences at once, as on a GPU: equal to group by group, and so many operations, no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kv_models import prompt, tiny
from op_tape import watched
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench import KVCache, make_policy
from kvbench.cache import cache as cache_module
from kvbench.cache.caller import Caller
from kvbench.engine import batch as engine
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.prompt_pass import next_logits, prefill
from kvbench.engine.sequence import Request
from kvbench.kernels import decode
from kvbench.policies.policy import Policy

BUDGETS = (40, 56)
SEVERAL = ("h2o", "tova", "caote_snapkv", "full", "ada_snapkv", "snapkv", "d2o", "kvec", "cake", "streamingllm")


def policies(slugs: Sequence[str], budgets: Sequence[int] = BUDGETS) -> list[Policy]:
    windows = {slug: {"window": 6} if "snapkv" in slug else {} for slug in slugs}
    return [make_policy(slug, budget, **windows[slug]) for slug in slugs for budget in budgets]


def model_of(family: str = "llama", **sizes: Any) -> Any:
    model = tiny(family, dtype=torch.float32, **sizes)
    model.set_attn_implementation("kvbench")
    return model


def asked(length: int, seed: int, new: int) -> Request:
    return Request(torch.tensor([prompt(length, seed)]), new)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches decode at once, and no number is at hand."""
    monkeypatch.setattr(engine, "use_triton", lambda x: True)
    monkeypatch.setattr("kvbench.policies.scorers.roco.on_host", lambda x: False)
    monkeypatch.setattr("kvbench.policies.ranking.on_host", lambda x: False)


def decoded(model: Any, some: Sequence[Policy]) -> list[Any]:
    """What every sequence of two examples is in the end; the second joins later and ends earlier."""
    flight, rows = DecodeBatch(model), []
    for seed, length, new in ((1, 90, 20), (2, 71, 9)):
        rows += flight.admit(asked(length, seed, new), some)
        flight.step()
    while flight.in_flight:
        flight.step()
    return [(row.error, row.tokens, *held(row.cache)) for row in rows]


def held(cache: KVCache | None) -> tuple[Any, ...]:
    assert cache is not None
    positions = [layer.positions.sort(-1).values.tolist() for layer in cache.layers]
    counts = [state.counts for layer in cache.layers for state in layer.states]
    return positions, counts, cache.nbytes, cache.peak_nbytes, cache.spare_nbytes


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("slugs", [SEVERAL, ("sirllm", "cam", "random"), ("tova", "kivi", "caote_tova")])
def test_every_sequence_is_what_it_is_group_by_group(
    slugs: Sequence[str], family: str, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, some = model_of(family), policies(slugs)
    if "random" in slugs:  # beside others that evict layer by layer
        some += [make_policy("kvec", budget, window=6, decode="evict") for budget in BUDGETS]
    opened: list[int] = []
    made = cache_module.DeviceBatch
    monkeypatch.setattr(cache_module, "DeviceBatch", lambda groups: (opened.append(len(groups)), made(groups))[1])
    together = decoded(model, some)
    assert opened, "batches were taken at once"
    monkeypatch.setattr(engine, "use_triton", lambda x: False)
    assert together == decoded(model, some)


@pytest.mark.parametrize("slugs", [("h2o", "tova", "caote_snapkv"), ("streamingllm", "knorm", "snapkv", "full")])
def test_sequences_below_their_budget_decode_in_the_same_launches(
    slugs: Sequence[str], as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 90 and 71 tokens, budgets of 40, 96 and 120: some sequences reach their budget on the way."""
    model, some = model_of(), policies(slugs, (40, 96, 120))
    joined: list[int] = []
    made = cache_module.DeviceBatch
    monkeypatch.setattr(cache_module, "DeviceBatch", lambda groups: (joined.append(len(groups)), made(groups))[1])
    groups = KVCache.on_device

    def all_join(cache: KVCache, wanted: bool = True) -> Any:
        found = groups(cache, wanted)
        assert not wanted or found is None or len(found.groups) == len(cache.groups)
        return found

    monkeypatch.setattr(KVCache, "on_device", all_join)
    together = decoded(model, some)
    assert joined, "batches were taken at once"
    monkeypatch.setattr(engine, "use_triton", lambda x: False)
    assert together == decoded(model, some)


def test_a_cache_may_leave_the_device_between_any_two_tokens() -> None:
    model, policy = model_of(), make_policy("caote_snapkv", 40, window=6)
    found = []
    for switches in (False, True):
        cache = KVCache(model.config, policy, prompt_length=60)
        with torch.inference_mode():
            logits, tokens = prefill(model, torch.tensor([prompt(60)]), None, cache), []
            for index in range(14):
                if switches:
                    cache.on_device(index % 5 < 3)
                tokens.append(logits.argmax(-1, keepdim=True))
                logits = next_logits(model, tokens[-1], None, torch.tensor([[60 + index]]), cache)
        cache.on_device(False)
        cache.audit()
        found.append(([int(token) for token in tokens], *held(cache)))
    assert found[0] == found[1]


def test_no_step_lets_the_host_wait(as_on_a_gpu: None) -> None:
    model, flight = model_of(), DecodeBatch(model_of())
    flight.admit(asked(90, 1, 20), policies(SEVERAL))
    for _ in range(8):
        flight.step()
    with torch.inference_mode():
        assert step_of(model, flight, watched) == []


def step_of(model: Any, flight: DecodeBatch, watch: Any) -> Any:
    """What is seen of one more step of a batch on the device."""
    cache = flight.cache
    assert cache is not None
    batch = cache.on_device()
    assert batch is not None
    cache._caller = Caller(cache.config)  # another model of the same kind may go on
    with watch() as found:
        next_logits(model, batch.slots.places.clone(), None, batch.slots.places, cache)
    return found


def test_h2o_s_sums_are_those_of_the_plain_path_and_come_out_of_the_attention(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slug in ("h2o", "caote_h2o"):
        assert launches_of(slug) == {"_attend": 2, "_join": 2, "_weigh": 2}
    model, found = model_of(), []
    for device in (True, False):
        monkeypatch.setattr(engine, "use_triton", lambda x, device=device: device)
        flight = DecodeBatch(model)
        rows = [row for seed in (1, 2) for row in flight.admit(asked(90, seed, 16), policies(("h2o",)))]
        while flight.in_flight:
            flight.step()
        found.append([sums(row.cache) for row in rows])
    torch.testing.assert_close(*found)


def sums(cache: KVCache | None) -> list[Tensor]:
    """What attention each token of every layer drew, in the order of their positions, [1,H,T,1]."""
    assert cache is not None
    stores = [layer.states[0].store for layer in cache.attention_layers]
    places = [store.positions.argsort(-1)[..., None] for store in stores]
    return [store.state["attention_sum"].gather(2, order) for store, order in zip(stores, places, strict=True)]


def launches_of(slug: str) -> Counter[str]:
    """Launches of a step of four sequences in two layers."""
    model, flight = model_of(layers=2), DecodeBatch(model_of(layers=2))
    for seed in (1, 2):
        flight.admit(asked(90, seed, 40), policies((slug,)))
    for _ in range(7):
        flight.step()
    with torch.inference_mode():
        launches: Counter[str] = step_of(model, flight, counted)[1]
    return launches


# --- so many operations ----------------------------------------------------------------------------------------------
class Counted(TorchDispatchMode):
    """Counts operations of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations[func.name()] += 1
        return func(*args, **(kwargs or {}))


class Launched:
    """Stands where a kernel stands, and counts its launches."""

    def __init__(self, name: str, launches: Counter[str]) -> None:
        self.name, self.launches = name, launches

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **kwargs: self.launches.update([self.name])


KERNELS = (decode, "_attend"), (decode, "_join"), (decode, "_weigh")


@contextmanager
def counted() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """PyTorch's operations, and launches of our kernels, which do nothing, on the path that a GPU takes."""
    launches: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch, Counted() as mode:
        patch.setattr(decode, "use_triton", lambda x: True)
        for module, name in KERNELS:
            patch.setattr(module, name, Launched(name, launches))
        yield mode.operations, launches


def counts(slugs: Sequence[str], budgets: Sequence[int], examples: int, layers: int) -> tuple[int, int]:
    """Operations and launches of a step."""
    model = model_of(layers=layers)
    flight = DecodeBatch(model)
    for seed in range(examples):
        flight.admit(asked(90, seed, 40), policies(slugs, budgets))
    for _ in range(7):
        flight.step()
    with torch.inference_mode():
        operations, launches = step_of(model, flight, counted)
    return operations.total(), launches.total()


def own_operations(layers: int) -> int:
    """Operations of the model itself, whose attention hands back its queries."""

    def nothing(cache: Any, index: int, new: Any, *rest: object) -> Tensor:
        queries: Tensor = new.queries
        return queries

    model, place = model_of(layers=layers), torch.zeros(3, 1, dtype=torch.long)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(), Counted() as mode:
        patch.setattr(KVCache, "attend", nothing)
        next_logits(model, place, None, place, KVCache(model.config, make_policy("full")))
    return mode.operations.total()


def test_a_layer_takes_three_launches_and_twelve_operations_whatever_decodes(as_on_a_gpu: None) -> None:
    model = own_operations(5) - own_operations(2)
    fixed = []
    several = [slug for slug in SEVERAL if slug != "d2o"]  # whose layers differ in what they hold, so budgets may too
    for case in ((("h2o",), (40,), 1), (("h2o",), BUDGETS, 3), (("d2o",), (40,), 2), (several, BUDGETS, 2)):
        few, many = counts(*case, layers=2), counts(*case, layers=5)
        assert many[0] - few[0] <= model + 3 * 12
        assert many[1] - few[1] == 3 * 3
        fixed.append(few[0] - own_operations(2) - 2 * (many[0] - few[0] - model) // 3)
    assert abs(fixed[0] - fixed[1]) <= 2, "budgets and examples are rows of one batch"
    assert fixed[-1] < 100 * len(several)
