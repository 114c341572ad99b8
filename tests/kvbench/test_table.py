"""Sequences that decode in a table are what they are alone, and the two backends give the same."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints
from unittest.mock import patch

import pytest
import torch
from kv_hybrids import HYBRIDS, tiny_hybrid
from kv_models import prompt, small, tiny
from kv_runs import finish, kept_now
from live_bytes import Live
from parameters import few_fast
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench import KVCache, make_policy
from kvbench.cache.attend import triton
from kvbench.cache.attend.torch import TorchBackend
from kvbench.cache.attend.triton import TritonBackend
from kvbench.cache.hook import prepare
from kvbench.cache.tables import leave_tables
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.logits import next_logits
from kvbench.engine.prefill import prefill
from kvbench.engine.sequence import LiveSequence, Request, script_of
from kvbench.policies.mergers.attention_matching import AttentionMatching
from kvbench.policies.policy import Policy
from kvbench.policies.schedule import Schedule

BUDGETS = (40, 56)
SEVERAL = ("h2o", "caote_snapkv", "full", "ada_snapkv", "d2o", "kvec", "cake")


def policies(slugs: Sequence[str], budgets: Sequence[int] = BUDGETS) -> list[Policy]:
    windows = {slug: {"window": 6} if "snapkv" in slug else {} for slug in slugs}
    return [make_policy(slug, budget, **windows[slug]) for slug in slugs for budget in budgets]


def model_of(family: str = "llama", **sizes: Any) -> Any:
    return prepare(tiny(family, dtype=torch.float32, **sizes))


def asked(length: int, seed: int, new: int) -> Request:
    return Request(script_of(torch.tensor([prompt(length, seed)])), new)


BACKEND = "kvbench.cache.attend.backend_of"


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are gathered by index, as on a GPU, and no number is read back from the device."""
    monkeypatch.setattr(BACKEND, lambda like: TritonBackend())


def decoded(
    model: Any, some: Sequence[Policy], shares: list[float] | None = None, flight: DecodeBatch | None = None
) -> list[Any]:
    """What every sequence of three examples is in the end; the later ones join later and end earlier.

    shares: of the sequences, in tables in every step.
    """
    flight, rows = flight or DecodeBatch(model), []
    for seed, length, new in ((1, 90, 14), (2, 71, 8), (3, 80, 5)):
        rows += flight.admit([asked(length, seed, new)], some)[0]
        for _ in range(seed):
            flight.step()
            if shares is not None:
                shares.append(sum(one.held.table is not None for one in flight.sequences) / flight.in_flight)
    finish(flight)
    return [(row.error, row.tokens, *held(row.cache)) for row in rows]


def held(cache: KVCache) -> tuple[Any, ...]:
    cache.audit()
    counts = [state.count for layer in cache.attention_layers for state in layer.states]
    return kept_now(cache), counts, cache.nbytes, cache.peak_nbytes, cache.spare_nbytes


def equal_one_by_one(model: Any, some: Sequence[Policy]) -> list[float]:
    """The shares of the sequences in tables in every step; they end as those of views, and of the general path."""
    shares = list[float]()
    together = decoded(model, some, shares)
    with patch(BACKEND, lambda like: TorchBackend()):
        assert together == decoded(model, some)
    with patch("kvbench.cache.tables.can_join", lambda sequence: False):
        assert [one[:3] for one in together] == [one[:3] for one in decoded(model, some)]
    return shares


@pytest.mark.parametrize(
    ("slugs", "family"),
    [
        (SEVERAL, "gemma2"),
        (("sirllm", "cam", "random"), "llama"),
        (("tova", "kivi", "caote_tova"), "llama"),
        (("h2o", "full", "caote_snapkv", "fp8"), "gemma3n"),  # its last layers read the tokens of earlier ones
        (("h2o", "full", "snapkv"), "gemma4"),  # and layers differ in the numbers of a head
    ],
)
def test_one_launch_equals_decoding_group_by_group(slugs: Sequence[str], family: str) -> None:
    some = policies(slugs)
    if "random" in slugs:  # beside others that evict layer by layer
        some += [make_policy("kvec", budget, window=6, decode="evict") for budget in BUDGETS]
    assert max(equal_one_by_one(model_of(family), some)) > 0.3


def test_heads_with_budgets_of_their_own_evict_in_the_table_as_outside() -> None:
    """From the first token in the table on, also that token itself."""
    some = [
        make_policy(slug, budget, decode="evict") for slug in ("global_h2o_norecent", "ada_tova") for budget in BUDGETS
    ]
    assert max(equal_one_by_one(model_of(), some)) == 1


def test_layers_that_store_latents_decode_in_the_table() -> None:
    """Scores of keys, of a window, of sums and of the newest query; values too."""
    some = [*policies(("full", "knorm", "h2o", "caote_tova")), make_policy("snapkv", 40, window=6, decode="evict")]
    assert max(equal_one_by_one(model_of("deepseek_v3"), some)) == 1


def test_slots_with_a_bias_decode_in_the_table() -> None:
    """As many in every head, and not; with decoding that evicts, also by sums, and by the newest query."""
    fitted = AttentionMatching(queries=8)
    some = [make_policy("attention_matching", 40, window=6, decode=decode) for decode in ("grow", "evict")]
    for slug, given in (("ada_snapkv", {"window": 6}), ("h2o", {}), ("tova", {}), ("roco", {})):
        some += [replace(make_policy(slug, 40, decode=decode, **given), merger=fitted) for decode in ("grow", "evict")]
    assert max(equal_one_by_one(model_of(), some)) == 1


def test_layers_of_different_numbers_of_heads_decode_in_the_table() -> None:
    """Layers that slide have two KV heads, others one. K-VEC's layers evict in their order, so it does not."""
    heads = {"num_key_value_heads": 1, "head_dim": 12, "v_head_dim": 8}
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    fields = {"layer_types": kinds, "num_hidden_layers": len(kinds), "sliding_window": 16, "n_routed_experts": 4}
    model = prepare(small("mimo_v2_flash", torch.float32, **heads, **fields))
    some = [*policies(("full", "h2o", "caote_tova", "ada_snapkv")), make_policy("kvec", 40, window=6, decode="evict")]
    assert 0.5 < max(equal_one_by_one(model, some)) < 1


@pytest.mark.parametrize("slugs", [("h2o", "tova", "rkv", "snapkv"), ("sirllm", "knorm", "roco", "caote_tova")])
def test_sequences_that_evict_several_tokens_at_once_leave_the_table_only_for_that(slugs: Sequence[str]) -> None:
    windows = {slug: {"window": 6} if slug in ("rkv", "snapkv") else {} for slug in slugs}
    some = [
        make_policy(slug, 40, decode="evict", every=every, **windows[slug]) for slug in slugs for every in (1, 2, 5)
    ]
    shares = equal_one_by_one(model_of(), some)
    assert max(shares) == 1
    assert any(0 < share < 1 for share in shares), "those that evict in this step are outside"


GROUPS: dict[str, dict[str, Any]] = {
    "kivi": {"group": 8, "residual": 16},
    "kivi, 4 bits": {"group": 4, "residual": 8, "bits": 4},
    "kcvc": {"group": 4, "residual": 8},
    "kcvc, without a residual": {"group": 8, "residual": 0, "bits": 8},
    "ott": {"group": 8, "residual": 4, "outliers": 2, "auxiliary": 4, "skip_layers": [0]},
}
CODES: dict[str, list[Policy]] = {
    **{slug: [make_policy(slug)] for slug in ("fp8", "fp8_per_token_head", "int4", "turboquant")},
    **{name: [make_policy(name.split(",")[0], **fields)] for name, fields in GROUPS.items()},
    "nvfp4": [make_policy("nvfp4", group=8)],
    "snapkv_fp8": [make_policy("snapkv_fp8", 40, window=6, decode="grow")],
    "cake_kivi": [make_policy("cake_kivi", 40, group=8, residual=8, decode="grow")],
    "several formats": [
        *(make_policy(slug) for slug in ("full", "fp8", "int4")),
        *policies(("h2o",)),
        make_policy("kivi", **GROUPS["kivi"]),
    ],
}


@pytest.mark.parametrize(
    "name",
    few_fast(
        CODES,
        ("kcvc", "ott", "turboquant", "nvfp4", "snapkv_fp8", "cake_kivi", "several formats"),
        pytest.mark.slow("decodes in every format"),
    ),
)
def test_sequences_in_codes_decode_on_the_device_as_they_do_one_by_one(name: str) -> None:
    assert min(equal_one_by_one(model_of(), CODES[name])) == 1, "every sequence is on the device in every step"


@torch.inference_mode()
@pytest.mark.parametrize("device", [True, False])
def test_the_peak_includes_the_growth_of_codes_in_groups_after_every_token(
    device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BACKEND, lambda like: TritonBackend() if device else TorchBackend())
    model, ids = model_of(), torch.tensor([prompt(74)])
    for slug in ("kivi", "kcvc", "ott"):
        policy = make_policy(f"knorm_{slug}", 40, decode="grow", **GROUPS[slug])
        cache = KVCache(model.config, policy, prompt_length=60)
        for call in ids.split([60, *[1] * 14], dim=1):
            model(call, past_key_values=cache)
            assert cache.nbytes <= cache.peak_nbytes


@pytest.mark.parametrize("slugs", [("h2o", "tova", "caote_snapkv"), ("streamingllm", "knorm", "snapkv", "full")])
def test_sequences_below_their_budget_decode_in_the_same_launches(
    slugs: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 90, 71 and 80 tokens, budgets of 40, 96 and 120: some sequences reach their budget on the way."""
    monkeypatch.setattr("kvbench.policies.stores.slot_store.GROWTH", 8)
    assert min(equal_one_by_one(model_of(), policies(slugs, (40, 96, 120)))) == 1, "all are on the device in every step"


def test_codes_below_their_budget_grow_and_then_evict() -> None:
    """The prompt of 71 tokens is below the budget, so that no eviction has stored its positions."""
    some, model, shares = [make_policy("snapkv_fp8", 75, window=6, decode="evict")], model_of(), list[float]()
    with patch(BACKEND, lambda like: TorchBackend()):
        together = decoded(model, some, shares)
    assert min(shares) == 1
    with patch("kvbench.cache.tables.can_join", lambda sequence: False):
        assert [one[:3] for one in together] == [one[:3] for one in decoded(model, some)]


@pytest.mark.parametrize("slug", ["d2o_no_layer_turboquant", "cam_turboquant"])
def test_only_merged_tokens_are_coded_again_in_the_table_and_outside(slug: str) -> None:
    """TurboQuant's codes of its codes differ from them."""
    some, model, shares = policies([slug]), model_of(), list[float]()
    with patch(BACKEND, lambda like: TorchBackend()):
        together = decoded(model, some, shares)
    assert min(shares) > 0
    with patch("kvbench.cache.tables.can_join", lambda sequence: False):
        assert [one[:3] for one in together] == [one[:3] for one in decoded(model, some)]


@pytest.mark.parametrize(
    "family", few_fast(HYBRIDS, ("nemotron_h", "zaya"), pytest.mark.slow("runs every hybrid family"))
)
def test_recurrent_states_stay_with_their_sequences(family: str) -> None:
    assert max(equal_one_by_one(prepare(tiny_hybrid(family)), policies(("full", "h2o")))) == 1


def test_a_sequence_may_leave_its_table_between_any_two_tokens() -> None:
    model, policy = model_of(), make_policy("caote_snapkv", 40, window=6)
    found = []
    for leaves in (False, True):
        cache = KVCache(model.config, policy, prompt_length=60)
        with torch.inference_mode():
            logits, tokens = prefill(model, torch.tensor([prompt(60)]), cache), []
            for index in range(14):
                if leaves and index % 5 == 3:
                    leave_tables(cache.sequences)
                tokens.append(logits.argmax(-1, keepdim=True))
                logits = next_logits(model, tokens[-1], torch.tensor([[60 + index]]), cache)
                assert cache.sequence.table is not None
        found.append(([int(token) for token in tokens], *held(cache)))
    assert found[0] == found[1]


def test_the_attention_sums_of_h2o_are_those_of_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = model_of(), []
    for device in (True, False):
        monkeypatch.setattr(BACKEND, lambda like, device=device: TritonBackend() if device else TorchBackend())
        flight = DecodeBatch(model)
        rows = [row for seed in (1, 2) for row in flight.admit([asked(90, seed, 16)], policies(("h2o",)))[0]]
        finish(flight)
        found.append([sums(row.cache) for row in rows])
    torch.testing.assert_close(*found)


def sums(cache: KVCache) -> list[Tensor]:
    """The attention that each token of every layer received, in the order of their positions, [1,H,T,1]."""
    stores = [layer.states[0].store for layer in cache.attention_layers]
    places = [store.positions.argsort(-1)[..., None] for store in stores]
    return [store.state["attention_sum"].gather(2, order) for store, order in zip(stores, places, strict=True)]


def addresses(row: LiveSequence) -> list[int]:
    return [x.data_ptr() for layer in row.cache.sequence.layers for x in layer.store.memory.values()]


@pytest.mark.parametrize("device", [True, False])
def test_a_failed_step_ends_its_sequences_and_leaves_nothing_behind(
    device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BACKEND, lambda like: TritonBackend() if device else TorchBackend())
    model, some = model_of(layers=4), policies(("h2o", "tova"))
    expected, flight = decoded(model, some), DecodeBatch(model)
    rows = flight.admit([asked(60, 1, 9)], some)[0]
    flight.step()
    error = RuntimeError("no memory is left")
    with patch.object(model.model.layers[2], "forward", side_effect=error):
        assert flight.step() == rows
    assert [row.error for row in rows] == [error] * 4
    assert (flight.in_flight, flight.nbytes) == (0, 0)
    assert decoded(model, some, flight=flight) == expected


@pytest.mark.parametrize("slug", ["h2o", "ada_snapkv", "full"])
def test_layers_can_be_read_between_two_steps(slug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = model_of(), []
    for device in (True, False):
        monkeypatch.setattr(BACKEND, lambda like, device=device: TritonBackend() if device else TorchBackend())
        flight, read = DecodeBatch(model), list[Any]()
        (row, *_) = flight.admit([asked(60, 1, 9)], policies((slug,), (40, 80)))[0]
        while flight.in_flight:
            read.append(flight.nbytes)
            read.append(kept_now(row.cache))
            flight.step()
        found.append(read)
    assert found[0] == found[1]


def test_a_sequence_keeps_its_addresses_while_others_come_and_go() -> None:
    model, some = model_of(), policies(("h2o", "full"))
    flight = DecodeBatch(model)
    (first, *_), (other, *_) = (flight.admit([asked(60, seed, new)], some)[0] for seed, new in ((1, 30), (2, 4)))
    flight.step()
    before = addresses(first), addresses(other)
    while not other.done:
        flight.step()
    again, *_ = flight.admit([asked(60, 3, 4)], some)[0]
    flight.step()
    assert addresses(first) == before[0]
    assert addresses(again) == before[1], "it has the slots of the finished sequence"
    assert addresses(other) != before[1], "the finished sequence has memory of its own"


class Operations(TorchDispatchMode):
    """Counts the operations on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_one_launch_of_attention_serves_all_budgets_and_operations_do_not_grow_with_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two policies, three budgets, of which a prompt of 60 tokens is below one; 6 and 12 sequences."""
    launches = list[int]()
    attention = triton.decode_attention_flat
    monkeypatch.setattr(
        triton, "decode_attention_flat", lambda *args, **how: (launches.append(1), attention(*args, **how))[1]
    )
    model, some, found = model_of(layers=4), policies(("tova", "h2o"), (40, 50, 100)), []
    for examples in (1, 2):
        flight = DecodeBatch(model)
        for seed in range(examples):
            flight.admit([asked(60, seed, 9)], some)[0]
        for _ in range(3):
            flight.step()
        launches.clear()
        cache = flight._cache
        rows = cache.begin_step(pads=False)
        assert len(rows) == 6 * examples
        tokens, places = torch.zeros(len(rows), 1, dtype=torch.long), cache.tables.positions
        with torch.inference_mode(), Operations() as operations:
            next_logits(model, tokens, places, cache)
        found.append((len(launches), operations.count))
    assert found[0][0] == 4, "one launch in each layer"
    assert found[0] == found[1]


def test_the_arenas_are_hardly_larger_than_their_sequences_and_freed_with_the_last() -> None:
    """Bytes alive while sequences are admitted, grow and finish: at most 1.6 of the most that they hold themselves."""
    model, some = model_of(query_heads=1, kv_heads=1, layers=4), policies(("h2o", "full"), (120,))
    with Live() as live:
        DecodeBatch(model).admit([asked(200, 9, 2)], some)[0]  # weights are counted as they are first used
        before, alive, own = live.now, list[int](), list[int]()
        flight, rows = DecodeBatch(model), []
        for seed in range(8):
            rows += flight.admit([asked(200, seed, 6 + 2 * seed)], some)[0]
            flight.step()
            alive.append(live.now - before)
            own.append(flight.nbytes + sum(row.cache.nbytes for row in rows if row.done))
        finish(flight)
        assert max(alive) < 1.6 * max(own)
        assert live.now - before <= 1.02 * sum(row.cache.nbytes for row in rows)


DECODING: dict[str, dict[str, Any]] = {
    "evict": {"scorer": "h2o", "decode": "evict", "budget": 40},
    "grow": {"scorer": "h2o", "decode": "grow", "budget": 40},
    "threshold": {"scorer": "threshold_random", "decode": "threshold", "tau": 0.5, "window": 8},
    "share": {"scorer": "h2o", "decode": "share", "budget": 0.4},
}


def test_every_way_of_decoding_has_a_case() -> None:
    decode = next(field for field in fields(Schedule) if field.name == "decode")
    assert set(DECODING) == set(get_args(get_type_hints(Schedule)[decode.name]))


@pytest.mark.parametrize("name", DECODING)
def test_both_backends_keep_the_same_tokens_however_decoding_evicts(name: str) -> None:
    """A threshold evicts while decoding too: with tau = 0.5, random scores keep about half of the tokens."""
    how = dict(DECODING[name])
    slug = how.pop("scorer")
    policy = make_policy(slug, **how)
    found = decoded(model_of(), [policy])
    with patch(BACKEND, lambda like: TorchBackend()):
        assert found == decoded(model_of(), [policy])
    held = [len(head) for layer in found[0][2][0] for head in layer]
    assert max(held) < (90 + 14 if name == "grow" else 80), "tokens were evicted"
