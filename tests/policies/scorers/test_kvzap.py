"""KVzap: gates, thresholds in prefill and decoding, and files that are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden import Case, cases, recorded_file
from kv_crafted import Crafted, observed
from kv_models import prompt, tiny
from kv_runs import run_greedy
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import kvbench
from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.cache.inputs import watch_inputs
from kvbench.errors import ConfigError
from kvbench.policies.policy import Policy
from kvbench.policies.scorers.kvzap import KVzap, gated
from kvbench.policies.scorers.kvzap_targets import InputMoments, KVzapTargets
from kvbench.tools.calibrate import main as calibrate
from kvbench.tools.kvzap_gate import check_gates, fit_linear, fit_mlp, read_text


def gate_file(folder: Path, weights: dict[str, torch.Tensor], **metadata: str) -> str:
    path = folder / "gate.safetensors"
    save_file(weights, path, metadata)
    return str(path)


def small(case: Case) -> PreTrainedModel:
    """The recorded model."""
    from transformers import CONFIG_MAPPING

    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97}
    tied = bool((case["model/lm_head.weight"] == case["model/model.embed_tokens.weight"]).all())
    shape |= {"intermediate_size": 48, "num_hidden_layers": 2, "tie_word_embeddings": tied}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[case["kind"]](**shape)).eval().float()
    weights = {name.removeprefix("model/"): x for name, x in case.items() if name.startswith("model/")}
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    return model


def gates(case: Case) -> dict[str, torch.Tensor]:
    found = {}
    for name, x in case.items():
        if name.startswith("gate/"):
            _, layer, own = name.split("/")
            found[f"layers.{layer}.{own}"] = x.contiguous()
    return found


@torch.inference_mode()
def test_kvpress_scores_and_keeps_the_same(tmp_path: Path) -> None:
    for case in cases("kvzap_dms.npz"):
        model, fed, file = small(case), case["fed_at_once"], gate_file(tmp_path, gates(case))
        fields = {"gate": file, "tau": case["threshold"], "allocator.window": case["window"], "decode": "threshold"}
        policy = make_policy("kvzap", **fields)
        for layer, hidden in enumerate(case["hidden"]):
            found = KVzap(file).predicted(layer, hidden[None], 2)[0].T
            torch.testing.assert_close(found, case["score"][layer], rtol=1e-4, atol=1e-5)
        if fed > 1:  # our decoding evicts after every token, also if a call brings several
            continue
        watch_inputs(model)
        model.set_attn_implementation("kvbench")
        cache = KVCache(model.config, policy, prompt_length=case["T"])
        logits = []
        for ids in case["ids"][None].split([case["T"], *[1] * case["steps"]], dim=1):
            logits.append(model(ids, past_key_values=cache).logits[0, -1])
            if cache.seen == case["T"]:
                assert kept(cache) == positions(case["kept_prefill"])
        cache.audit()
        assert kept(cache) == positions(case["kept_end"])
        torch.testing.assert_close(torch.stack(logits), case["logits"], rtol=1e-4, atol=1e-4)


def kept(cache: KVCache) -> list[list[list[int]]]:
    return [[sorted(p for p in head.tolist() if p >= 0) for head in layer.positions[0]] for layer in cache.layers]


def positions(masks: list[torch.Tensor]) -> list[list[list[int]]]:
    return [[head.nonzero().flatten().tolist() for head in mask] for mask in masks]


def by_threshold(slug: str, tau: float, **fields: Any) -> Policy:
    return make_policy(f"threshold_{slug}", **{"tau": tau, "allocator.window": 8}, **fields)


@pytest.mark.parametrize("decode", ["threshold", "grow"])
def test_a_token_below_the_threshold_goes_when_it_leaves_the_window(decode: str) -> None:
    policy = by_threshold("random", 0.6, decode=decode)
    run = run_greedy(tiny(), [prompt(40), prompt(33, seed=1)], policy, 6)
    for row, length in enumerate((40, 33)):
        draws = {}
        for call, layers in enumerate(run.of_row(row)):
            seen = length + call
            for layer, heads in enumerate(layers):
                for head, held in enumerate(heads):
                    window = set(range((seen if decode == "threshold" else length) - 8, seen))
                    assert window <= set(held)
                    draws.setdefault((layer, head), set(range(seen - 8)) - set(held))
                    gone = set(range(seen)) - set(held)
                    assert draws[layer, head] <= gone, "a token comes back"
                    if decode == "grow":
                        assert gone == draws[layer, head]
        shares = [len(gone) / (length - 8) for gone in draws.values()]
        assert 0.3 < sum(shares) / len(shares) < 0.9


@pytest.mark.parametrize(
    ("decode", "block", "matched"),
    [("threshold", None, "none"), ("threshold", 8, "none"), ("grow", 8, "none"), ("grow", None, "global")],
)
def test_the_footprint_is_that_of_the_mean_head(decode: str, block: int | None, matched: str) -> None:
    """Every call of n tokens onto h entries counts n h + n (n + 1) / 2, in every head."""
    schedule = "blocks" if block else "prompt"
    policy = by_threshold("random", 0.7, decode=decode, matched=matched, schedule=schedule, block=block)
    run, entries, held, seen = run_greedy(tiny(), [prompt(40)], policy, 6), 0, [0] * 4, 0
    for layers in run.of_row(0):
        now = sum(held) == 0 and not block
        tokens = 40 if now else 8 if seen < 40 else 1
        entries += sum(tokens * before + tokens * (tokens + 1) // 2 for before in held)
        held, seen = [len(head) for layer in layers for head in layer], seen + tokens
    assert len({*held}) > 1
    assert isinstance(run.cache, KVCache)
    kept = [[len(head) for head in layer] for layer in run.of_row(0)[-1]]
    assert run.cache.sequence.footprint(kept, 5) == pytest.approx(entries / 4, rel=1e-12)


def test_a_score_is_compared_with_the_threshold_before_it_is_rounded() -> None:
    """Norms of 1 and 1 + 1e-4 are equal in half of the bits, so that they tie; the threshold lies between them."""
    keys = torch.tensor([[[[1.0, 0], [1.0001, 0]]]])
    policy = make_policy("threshold_knorm", tau=-1.00005, **{"allocator.window": 0})
    ranking = policy.rank(observed(keys, packed=True, budgets=(0,)), {})
    assert ranking.scores[0, 0, 0] == ranking.scores[0, 0, 1]
    assert policy.allocator.heads(0, ranking, []).tolist() == [[1]]


def test_a_control_evicts_from_a_layer_in_which_one_head_keeps_every_token() -> None:
    keys = torch.ones(1, 2, 20, 8)
    keys[:, 0] *= 3  # the first head's norms are below the threshold
    policy = make_policy("threshold_knorm", tau=-5.0, decode="grow", matched="global", **{"allocator.window": 2})
    layer = Crafted(policy, 2, 2, prompt_length=20)
    layer.call(keys, keys, keys)
    assert [len(head) for head in layer.kept()] == [2, 20]


def test_a_control_keeps_as_many_tokens_of_each_example() -> None:
    model, lengths = tiny(), (40, 33)
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    chosen, uniform, best = (
        [run.of_row(row)[0] for row in range(2)]
        for run in (
            run_greedy(model, prompts, by_threshold("random", 0.6, decode="grow", matched=matched), 1)
            for matched in ("none", "uniform", "global")
        )
    )
    for row, length in enumerate(lengths):
        heads = [set(head) for layer in chosen[row] for head in layer]
        budget = round(sum(map(len, heads)) / len(heads))
        newest = set(range(length - 8, length))
        equals, bests = ([head for layer in control[row] for head in layer] for control in (uniform, best))
        for own, equal, of_all in zip(heads, equals, bests, strict=True):
            assert len(equal) == budget
            assert newest <= set(equal) & set(of_all)
            assert own <= set(equal) or set(equal) <= own  # the same scores, longer or shorter
            assert len(own ^ set(of_all)) <= len(heads)
        assert sum(map(len, bests)) == budget * len(heads)


def test_files_that_are_no_gate_of_the_model_are_refused(tmp_path: Path) -> None:
    torch.save({"layers.0.weight": torch.ones(2, 3)}, tmp_path / "gate.pt")
    linear = {"layers.0.weight": torch.ones(2, 3), "layers.0.bias": torch.zeros(2)}
    for path, message in ((tmp_path / "gate.pt", "pickles"), (tmp_path / "none", "is not a file"), ("", "must name")):
        with pytest.raises(ConfigError, match=message):
            KVzap(str(path))
    with pytest.raises(ConfigError, match="must contain layers"):
        KVzap(gate_file(tmp_path, {"weight": torch.ones(2)}))
    gate = KVzap(gate_file(tmp_path, linear))
    for layer, size, heads, message in ((1, 3, 2, "1 layer,"), (0, 4, 2, "3 hidden"), (0, 3, 3, "2 KV heads")):
        with pytest.raises(ConfigError, match=message):
            gate.predicted(layer, torch.zeros(1, 1, size), heads)
    percentiles = json.dumps([float(p) for p in range(1, 100)])
    file = gate_file(tmp_path, linear, percentiles=percentiles)
    assert make_policy("kvzap", gate=file, tau=None, keep=0.3).allocator.tau == 70


def test_a_gate_of_fast_kvzip_is_that_of_kvpress(tmp_path: Path) -> None:
    module = pytest.importorskip("kvpress.presses.fastkvzip_press", reason="kvpress is not installed")
    torch.manual_seed(0)
    theirs = module.FastKVzipGate(0, 24, 2, 3, torch.float32, output_dim=4, sink=5)
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight)
    weights = {f"layers.0.{name}": x.detach().clone() for name, x in theirs.state_dict().items()}
    hidden = torch.randn(1, 7, 24)
    found = KVzap(gate_file(tmp_path, weights)).predicted(0, hidden, 2)
    torch.testing.assert_close(found.mT, theirs(hidden).detach(), rtol=1e-5, atol=1e-6)


def test_the_recorded_targets_and_their_ridge_regression() -> None:
    with np.load(recorded_file("kvzap_targets.npz")) as arrays:
        case: Case = {name: torch.from_numpy(arrays[name]) for name in arrays.files} | {"kind": "llama"}
    first, last, repeat, end = case["spans"].tolist()
    targets = KVzapTargets((first, last), (repeat, end), share=0.0)
    model = prepare(small(case))
    read_text(model, case["ids"], targets)
    for layer, moments in targets.found.items():
        x, y = (case[name][:, layer].double() for name in "Xy")
        torch.testing.assert_close(moments.y, y.sum(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(moments.xy, x.mT @ y, rtol=1e-4, atol=1e-3)
        weight, bias = moments.ridge()
        torch.testing.assert_close(weight, case[f"ridge_W/{layer}"], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(bias, case[f"ridge_b/{layer}"], rtol=1e-3, atol=1e-4)


def test_a_network_fits_a_nonlinear_target(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for layer in range(2):
        x = torch.randn(3000, 6, generator=generator)
        y = torch.stack([x[:, 0] * x[:, 1] + x[:, 3] / 2, x[:, 2].abs() + x[:, 4] / 3], dim=1)  # a fifth is linear
        found[layer] = InputMoments(rows=[])
        found[layer].add(x, y, torch.arange(3000) < 300)
    line, _ = check_gates(found, fit_linear(found))
    network, percentiles = check_gates(found, gates := fit_mlp(found, width=64, epochs=30))
    assert min(network) > 0.8 > 0.3 > max(line) > 0.1
    assert percentiles == sorted(percentiles)
    tensors = {f"layers.{layer}.{name}": x for layer, gate in enumerate(gates) for name, x in gate.items()}
    scorer = KVzap(gate_file(tmp_path, tensors))
    torch.testing.assert_close(scorer.predicted(1, x[None], 2)[0], gated(gates[1], x))


def test_a_calibration_writes_a_gate_with_percentiles_that_a_threshold_reads(tmp_path: Path) -> None:
    gate = tmp_path / "gate.safetensors"
    fields = ["kvzap", "model=pocket", "task=niah", "task.lengths=[256]", "limit=6", "-o", str(gate)]
    assert calibrate([*fields, "form=mlp"]) == 0
    assert KVzap(str(gate)).predicted(0, torch.zeros(1, 1, 128), 2).shape == (1, 1, 2)
    assert calibrate([*fields, "form=tree"]) == 2
    assert calibrate(fields) == 0
    rows = kvbench.evaluate(
        "pocket",
        policies=[make_policy("kvzap", gate=str(gate), tau=None, keep=0.5, **{"allocator.window": 16})],
        limit=3,
        lengths=[256],
    )
    assert rows[0].budget is None
    assert rows[0].n_failed == 0
    share = rows[0].kept_tokens / (sum(s.prompt_tokens for s in rows[0].samples) / 3)
    assert 0.2 < share < 0.9
