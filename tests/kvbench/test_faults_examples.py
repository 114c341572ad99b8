"""One example that cannot be computed is a recorded failure with its sentence; the others are as they would be."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_cells import SMALL, small_cell
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvbench.cli import main
from kvbench.engine.prompts import make_prompts
from kvbench.engine.run import run_cells
from kvbench.engine.watch import Nobody
from kvbench.identity.cell import Cell

HUNGRY = '''
"""A scorer that needs more memory than there is, for a prompt of one length."""

from dataclasses import dataclass

import torch
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class Hungry(Scorer):
    """Keeps short keys."""

    at: int = 0
    real: bool = True

    def score(self, observation, state):
        if bool((observation.seen == self.at).any()):
            if self.real:
                torch.empty(1 << 50, dtype=torch.uint8)  # a thousand TiB
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\\nIf reserved but")
        return -observation.keys.float().norm(dim=-1)
'''


@pytest.fixture
def hungry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of configurations with the policy `hungry`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_conf/policy").mkdir(parents=True)
    (tmp_path / "my_conf/policy/hungry.yaml").write_text(
        "_target_: kvbench.policies.policy.Policy\nscorer: {_target_: hungry_scorers.Hungry}\n"
    )
    (tmp_path / "hungry_scorers.py").write_text(HUNGRY)
    yield tmp_path
    sys.modules.pop("hungry_scorers", None)


def samples(out: Path) -> list[dict[str, Any]]:
    (path,) = out.glob("*/samples.jsonl")
    return rows_of(path.parent)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def timeless(sample: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on how the example was scheduled; keys of one letter have one norm but for the rounding."""
    return {k: v for k, v in sample.items() if "seconds" not in k and k not in ("rows_in_flight", "kept_heads")}


@pytest.mark.parametrize(
    ("real", "sentence"),
    [
        ("true", "tried to allocate 1125899906842624 bytes"),
        ("false", "CUDA out of memory. Tried to allocate 20 GiB."),
    ],
)
def test_an_example_without_memory_is_recorded_and_the_others_go_on(
    real: str, sentence: str, hungry: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ("task.lengths=[300,400,500]", "task.depths=[0.5]")
    command = ["--config-dir", "my_conf", f"model={tiny_model}", "policy=hungry", "budget=40", *SMALL, *lengths]
    assert main([*command, "out=whole"]) == 0
    whole = samples(hungry / "whole")
    middle = whole[1]["prompt_tokens"]
    assert len({sample["prompt_tokens"] for sample in whole}) == 3
    capsys.readouterr()
    broken = [*command, f"policy.scorer.at={middle}", f"policy.scorer.real={real}", "out=broken"]
    for _ in range(2):  # the second time from what lies on disk
        assert main(broken) == 1
        said = capsys.readouterr().err
        assert "1 of 3 examples" in said
        assert "Traceback" not in said
    first, failed, last = samples(hungry / "broken")
    assert sentence in failed["error"]
    assert "\n" not in failed["error"], "one sentence"
    assert (failed["score"], failed["output"], failed["kept_tokens"]) == (None, None, None)
    assert [timeless(first), timeless(last)] == [timeless(whole[0]), timeless(whole[2])]
    (metrics,) = [json.loads(path.read_text()) for path in (hungry / "broken").glob("*/metrics.json")]
    assert (metrics["n"], metrics["n_failed"], metrics["score"]) == (3, 1, None)


def spoilt_model(folder: Path, tokenizer: Path, tokens: Sequence[int]) -> Path:
    """A random Llama whose embeddings of some tokens are NaN: so are all logits after one of them."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    places = {"max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=258, **sizes, **heads, **places, tie_word_embeddings=False))
    with torch.no_grad():
        model.model.embed_tokens.weight[list(tokens)] = torch.nan
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


ONE_TOKEN = ("task.max_new_tokens=1", "task.chat=false")


def only_in(prompts: Sequence[Sequence[int]], index: int) -> int:
    """A token of one prompt that no other has."""
    others = {token for number, prompt in enumerate(prompts) if number != index for token in prompt}
    found = sorted(set(prompts[index]) - others)
    assert found, "the prompts share all their letters"
    return found[0]


def cells_of(model: Path, out: Path) -> list[Cell]:
    return [small_cell(out, model, policy, 40, *ONE_TOKEN) for policy in ("full", "streamingllm", "h2o")]


def test_an_example_whose_logits_are_nan_is_recorded_and_the_others_go_on(tmp_path: Path, tiny_model: Path) -> None:
    sound = spoilt_model(tmp_path / "sound", tiny_model, ())
    prompts = [prompt.ids.tolist() for prompt in make_prompts(cells_of(sound, tmp_path / "unused")[0])]
    index = next(i for i in range(3) if len(set(prompts[i]) - {t for j in range(3) if j != i for t in prompts[j]}))
    spoilt = spoilt_model(tmp_path / "spoilt", tiny_model, [only_in(prompts, index)])
    whole = run_cells(cells_of(sound, tmp_path / "whole"))
    told: list[int] = []

    class Listening(Nobody):
        def finished(self, cell: Cell, sample: Any) -> None:
            told.append(sample.index)

    broken = run_cells(cells_of(spoilt, tmp_path / "broken"), Listening())
    assert sorted(told) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for ours, theirs in zip(broken, whole, strict=True):
        assert ours.error is None, "a cell with a failed example is complete"
        assert ours.folder is not None
        assert theirs.folder is not None
        for number, (row, right) in enumerate(zip(rows_of(ours.folder), rows_of(theirs.folder), strict=True)):
            if number == index:
                assert "NaN" in str(row["error"])
                assert (row["score"], row["output"]) == (None, None)
            else:
                assert timeless(row) == timeless(right)
