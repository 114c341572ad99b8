"""`kvbench bench`: rows, bytes worked out by hand, tokens equal to those of generation, wrong arguments."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from kv_models import tiny, tiny_mixture

from kvbench import make_policy
from kvbench.engine.generate import generate_tokens
from kvbench.models.devices import copy_rate
from kvbench.models.given import borrowed
from kvbench.tools.bench import latency, measure
from kvbench.tools.bench.cli import main
from kvbench.tools.bench.measure import Contender, Timing
from kvbench.tools.bench.settings import Settings

PER_TOKEN = 2 * 2 * 2 * 8 * 4  # bytes: layers, KV heads, key and value, head dimension, float32
POSITIONS = 2 * 2 * 4  # bytes of a token's int32 positions: layers, KV heads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of a tiny model and no weights."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 4096, "dtype": "float32",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_policies_lengths_and_batches_make_one_row_each_and_calls_append(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        f"model={folder}",
        f"out={tmp_path}",
        "device=cpu",
        "new_tokens=3",
        "rounds=2",
        "baselines=transformers",
    ]
    assert main([*arguments, "policies=full,tova", "budgets=0.5", "lengths=40,80", "batches=1,2"]) == 0
    assert main([*arguments, "policies=full", "lengths=40"]) == 0
    table = pd.read_csv(tmp_path / "bench.csv").fillna({"budget": 0})
    assert len(table) == 2 * 2 * 3 + 2
    assert "transformers" in capsys.readouterr().out
    assert set(table.columns) >= {"hardware", "torch", "revision", "dtype", "peak_mib"}
    for figure in ("prefill_ms", "decode_ms", "total_ms", "tokens_per_s"):
        assert (table[f"{figure}_p20"] > 0).all()
        assert (table[f"{figure}_p20"] <= table[figure]).all()
        assert (table[figure] <= table[f"{figure}_p80"]).all()
    held = table.set_index(["policy", "budget", "prompt", "batch"]).held_mib.groupby(level=[0, 1, 2, 3]).first() * 2**20
    assert held["transformers", 0, 80, 2] == pytest.approx(2 * 82 * PER_TOKEN, rel=1e-4)  # the last token is not stored
    assert held["full", 0, 40, 1] == pytest.approx(42 * (PER_TOKEN + POSITIONS), rel=1e-4)
    assert held["full", 0, 80, 1] > held["tova", 0.5, 80, 1] > 40 * PER_TOKEN


@pytest.mark.parametrize("slug", ["full", "snapkv", "h2o", "kivi"])
def test_the_measured_tokens_are_those_of_generation(slug: str) -> None:
    model = tiny()
    contender = Contender(slug, 64, make_policy(slug, 64))
    ids = measure.random_prompt(model, 1, 100)
    with borrowed(model):
        expected = generate_tokens(model, ids, make_policy(slug, 64), max_new_tokens=6, min_new_tokens=6).tokens
    assert measure.measure(model, contender, ids, 6).tokens == expected


def test_transformers_cache_equals_full_and_its_attention_is_restored() -> None:
    model = tiny()
    ids = measure.random_prompt(model, 2, 50)
    before = model.config._attn_implementation
    transformers = measure.measure(model, Contender("transformers"), ids, 5)
    full = measure.measure(model, Contender("full", None, make_policy("full")), ids, 5)
    assert transformers.tokens == full.tokens
    assert model.config._attn_implementation == before


def test_memory_that_is_too_small_is_a_row_and_larger_batches_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def limited(model: object, contender: Contender, ids: torch.Tensor, new_tokens: int) -> Timing:
        tried.append((contender.name, len(ids)))
        if contender.name == "full" and len(ids) > 1:
            raise torch.OutOfMemoryError("no memory")
        return Timing(4.0, 2.0, 2**20, None, [])

    monkeypatch.setattr(latency, "measure", limited)
    settings = Settings(policies=["full", "h2o"], lengths=[10], batches=[4, 1, 2], new_tokens=3, rounds=1, baselines=[])
    found = [row for rows in latency.rows(tiny(), settings) for row in rows]
    assert [(row["policy"], row["batch"], row["error"]) for row in found] == [
        ("full", 1, ""), ("h2o", 1, ""), ("full", 2, "out of memory"), ("h2o", 2, ""), ("h2o", 4, ""),
    ]  # fmt: skip
    assert ("full", 4) not in tried
    assert tried[:4] == [("full", 1), ("h2o", 1)] * 2, "they take turns"
    assert found[3]["tokens_per_s"] == 1000 * 2 * 3 / (4 + 2 * 2)
    assert (found[3]["decoded_per_s"], found[3]["each_per_s"]) == (1000, 500)


def test_a_batch_whose_cache_cannot_fit_is_a_row_and_is_not_tried() -> None:
    settings = Settings(policies=["full", "fp8"], lengths=[10], batches=[10**9], rounds=1, baselines=["transformers"])
    found = [row for rows in latency.rows(tiny(), settings) for row in rows]
    assert [(row["policy"], row["error"]) for row in found] == [
        ("transformers", "out of memory"), ("full", "out of memory"), ("fp8", "out of memory"),
    ]  # fmt: skip


def test_the_bound_is_a_copy_of_weights_and_cache() -> None:
    samples = [Timing(9.0, ms, 1_000, None, []) for ms in (2.0, 4.0, 8.0)]
    assert latency.Bound(3_000, rate=1e6).share(samples) == 1.0  # 4,000 bytes take 4 ms, the median step as long
    assert latency.Bound(None, rate=1e6).share(samples) is None


def test_a_step_reads_input_embeddings_only_if_they_are_the_output_too() -> None:
    model = tiny()
    everything = sum(x.nbytes for x in model.parameters())
    embeddings = model.get_input_embeddings().weight
    assert measure.weights_read(model) == everything - embeddings.nbytes
    model.get_output_embeddings().weight = embeddings
    assert measure.weights_read(model) == everything - embeddings.nbytes  # there is one of the two now
    assert measure.weights_read(tiny_mixture("mixtral")) is None


def test_the_rate_of_a_copy_is_that_of_memory() -> None:
    assert 1e8 < copy_rate(torch.device("cpu")) < 1e12


@pytest.mark.parametrize(
    ("word", "said"),
    [("batches=0", "batches must be at least 1, got 0"), ("batches=x", "could not be converted to Integer")],
)
def test_wrong_batches_are_refused_in_a_sentence(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def test_a_shared_sweep_and_single_runs_give_the_same_answers_and_hold_the_same_bytes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["lengths=128", "new_tokens=6", "rounds=1", "policies=snapkv,h2o,full", "budgets=64"]
    assert main(["sweep", f"model={folder}", f"out={tmp_path}", "device=cpu", *sizes]) == 0
    single, shared = pd.read_csv(tmp_path / "sweep.csv").itertuples()
    assert (single.runs, shared.runs, single.variants) == ("single", "shared", 3)
    assert single.equal_answers == shared.equal_answers == 1
    assert single.held_mib == shared.held_mib > 0
    rounds = [line for line in capsys.readouterr().err.splitlines() if "128 tokens, " in line]
    assert [line.split(", ")[1].split(":")[0] for line in rounds] == ["warm-up", "round 1 of 1"]
