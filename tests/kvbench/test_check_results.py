"""`kvbench results check`: honest runs agree with their samples, doctored ones are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli import main as run
from kvbench.results.__main__ import main
from kvbench.results.files import read_yaml, write_yaml
from kvbench.results.loading import read_result
from kvbench.results.metrics import write_metrics
from kvbench.run.digests import digest_of

POLICIES = "full,snapkv,knorm,p2a_h2o,kvzip,kivi,quest"
Line = dict[str, Any]
Doctor = Callable[[Path], object]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the pocket model; one with its divergence; two sampled answers per prompt, and a logger."""
    out = tmp_path_factory.mktemp("runs") / "mine"
    shared = ["policy=" + POLICIES, "budget=64", "limit=3", f"out={out}"]
    context = [
        "compress=context",
        "schedule=prompt",
        "decode=evict",
        "every=1",
        "task.length=300",
        "task.max_new_tokens=12",
    ]
    assert run(["-m", *shared, "task=ruler/niah_single_1", *context]) == 0
    alone = ["policy=tova", "budget=64", "limit=2", "task=ruler/niah_single_1", *context[-2:], "task.divergence=true"]
    assert run([*alone, f"out={out}"]) == 0
    sampled = ["policy=h2o", "budget=64", "task=niah", "task.lengths=[200]", "limit=1", "generation.temperature=1.0"]
    assert run([*sampled, "generation.samples=2", f"out={out}", "logger=wandb", "logger.mode=disabled"]) == 0
    return out


@pytest.fixture
def mine(honest: Path, tmp_path: Path) -> Path:
    """A copy to doctor."""
    return Path(shutil.copytree(honest, tmp_path / "mine"))


def of(folder: Path, policy: str) -> Path:
    """The folder of a policy's run."""
    (found,) = folder.glob(f"pocket-{policy}-*niah_single_1*")
    return found


def each_line(folder: Path, change: Callable[[Line], object], only: int | None = 1) -> None:
    """Change a line of the samples, or all, and sum the run up again, as a careful forger would."""
    path = folder / "samples.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if only in (None, line["index"]):
            change(line)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    summed_up(folder)


def summed_up(folder: Path) -> None:
    write_metrics(folder, read_result(folder).samples)


def each_config(folder: Path, change: Callable[[Line], object]) -> None:
    config = read_yaml(folder / "config.yaml")
    change(config)
    write_yaml(folder / "config.yaml", config)


def _swap(line: Line) -> None:
    line["kept_tokens"][0], line["kept_tokens"][1] = (
        [n + d for n in line["kept_tokens"][i]] for i, d in ((0, 9), (1, -9))
    )


def line(only: int | None = 1, **fields: Any) -> Doctor:
    """Gives a line of the samples other values."""
    return lambda folder: each_line(folder, lambda line: line.update(fields), only)


def head(line: Line, layer: int, kv_head: int, tokens: int) -> None:
    line["kept_tokens"][layer][kv_head] = tokens


def first(name: str, value: float) -> Callable[[Line], object]:
    """Gives the first token of an answer another number of its divergence."""
    return lambda line: line["divergence"][name].__setitem__(0, value)


def config(change: Callable[[Line], object]) -> Doctor:
    return lambda folder: each_config(folder, change)


def text(name: str, old: str, new: str) -> Doctor:
    """Changes a file by hand, and sums nothing up again."""
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new))


DOCTORED: dict[str, tuple[str, Doctor, str]] = {
    "score": ("knorm", lambda f: each_line(f, lambda x: x.update(score=1 - x["score"])), "example 1: its score is"),
    "output": ("full", line(output="edited"), "but its answer scores 0"),
    "references": ("snapkv", line(references=["1"]), "its references is not that of the task"),
    "prompt": ("snapkv", line(prompt_hash="0" * 64), "its prompt_hash is not that of the task"),
    "more tokens": (
        "snapkv",
        lambda f: each_line(f, lambda x: head(x, 2, 0, 70)),
        "layer 2 holds 70 tokens per KV head, but its budget is 64",
    ),
    "fewer tokens": (
        "kvzip",
        line(kept_tokens=[[20, 20]] * 4),
        "holds 80 tokens per KV head in 4 layers, but its budget is 256",
    ),
    "other layers": ("snapkv", lambda f: each_line(f, _swap), "layer 0 holds 73 tokens per KV head"),
    "another total": ("p2a_h2o", lambda f: each_line(f, lambda x: head(x, 3, 1, 99)), "but its budget is 256"),
    "too many tokens": ("kivi", lambda f: each_line(f, lambda x: head(x, 0, 0, 10**6)), "tokens of prompt and answer"),
    "tokens read": ("quest", line(read_tokens=[[900, 900]] * 4), "its last token read 900 tokens per KV head"),
    "bytes": ("snapkv", line(None, cache_bytes=100_000), "but its tokens take at least"),
    "the full cache's bytes": ("snapkv", line(full_cache_bytes=2**30), "its full cache has"),
    "cut off": (
        "snapkv",
        line(finish_reason="length", generated_tokens=2, decode_steps=2),
        "its finish_reason is length",
    ),
    "footprint": ("full", line(kv_footprint=0.5), "its kv_footprint is 0.5, but full has one from 1 to 1"),
    "longer answers": ("snapkv", line(decode_steps=4000, generated_tokens=4000), "it has 4000 new tokens"),
    "a hole": ("snapkv", lambda f: _cut(f, lambda x: x[::2], sums=False), "line 2: not the sample of example 1"),
    "an example twice": (
        "full",
        lambda f: _cut(f, lambda x: [*x[:2], x[0]], number=True),
        "example 2: its prompt_hash",
    ),
    "seed of the configuration": (
        "snapkv",
        config(lambda x: x["config"].update(seed=1)),
        "seed of its identity does not fit its configuration",
    ),
    "budget": (
        "snapkv",
        config(lambda x: (x["config"].update(budget=65), _set_identity(x, budget=65))),
        "but its budget is 260",
    ),
    "weights": (
        "snapkv",
        config(lambda x: x["identity"]["model"].update(sha256="0" * 64)),
        "model of its identity does not fit",
    ),
    "name of the policy": (
        "snapkv",
        config(lambda x: x["naming"].update(policy="knorm")),
        "it is named knorm, but has the configuration of another policy",
    ),
    "task": ("snapkv", config(lambda x: x["config"]["task"].update(length=1024)), "task of its identity does not"),
    "the digest": ("snapkv", config(lambda x: x.update(run_id="pocket-x-0123456789")), "its run id is not the digest"),
    "samples after the run": (
        "snapkv",
        text("samples.jsonl", '"spare_bytes": ', '"spare_bytes": 1'),
        "metrics.json does not contain the metrics of its samples (spare_bytes)",
    ),
    "a KL": ("tova", lambda f: each_line(f, first("kl", -0.5)), "a KL below 0"),
    "a flag": ("tova", lambda f: each_line(f, first("same_top", 2)), "a flag that is neither 0 nor 1"),
    "numbers of tokens": ("tova", lambda f: each_line(f, lambda x: x["divergence"]["kl"].pop()), "numbers, but"),
    "no divergence": ("tova", lambda f: each_line(f, lambda x: x.pop("divergence")), "it has no divergence from full"),
    "the metrics": (
        "knorm",
        text("metrics.json", '"score_low": 0', '"score_low": 1'),
        "metrics.json does not contain the metrics of its samples (score_low)",
    ),
}


def _set_identity(config: Line, **fields: Any) -> None:
    """A forger who knows that the run id ends with the digest of the identity."""
    config["identity"].update(fields)
    config["run_id"] = f"pocket-{digest_of(config['identity'])}"


def _cut(folder: Path, pick: Callable[[list[Line]], list[Line]], number: bool = False, sums: bool = True) -> None:
    path = folder / "samples.jsonl"
    lines = pick([json.loads(line) for line in path.read_text().splitlines()])
    lines = [{**line, "index": i} if number else line for i, line in enumerate(lines)]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    if sums:
        summed_up(folder)


def test_honest_runs_agree_with_their_samples(honest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = of(honest, "full")
    written = json.loads((folder / "metrics.json").read_text())
    another = {**written, "computed_from": "another version", "a metric of another version": 1}
    (folder / "metrics.json").write_text(json.dumps(another))
    assert main(["check", str(honest)]) == 0
    (folder / "metrics.json").write_text(json.dumps(written))
    assert capsys.readouterr().out == f"{honest}: the samples agree in 9 of 9 runs\n"


@pytest.mark.parametrize("what", DOCTORED)
def test_a_doctored_run_is_refused_with_the_reason(what: str, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy, doctor, message = DOCTORED[what]
    folder = of(mine, policy)
    doctor(folder)
    assert main(["check", str(folder)]) == 1
    assert message in capsys.readouterr().err
