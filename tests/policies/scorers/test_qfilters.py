"""Q-Filters: projections on where queries point, and the calibration that finds it on a model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kv_crafted import observed
from kv_models import prompt, tiny
from kvpress_kept import FAMILIES, policy_keeps, press_keeps, presses, small
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvbench import make_policy
from kvbench.cache.hook import prepare
from kvbench.engine.generate import generate_tokens
from kvbench.policies.scorers.qfilters import QFilters
from kvbench.tools.calibrate import main, q_filters

TEXTS = [torch.tensor(prompt(length, seed=length)) for length in (40, 25)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Filters of the tiny model: two layers, two KV heads of 8."""
    running = prepare(tiny())
    path = tmp_path / "filters.safetensors"
    save_file({"q_filters": q_filters(running, TEXTS)}, path)
    return path


def test_a_key_scores_by_how_far_it_lies_against_its_filter(tmp_path: Path) -> None:
    """Filters (-1, 0) and (0.6, 0.8): keys (3, 4) and (-1, 2) score 3 and -1, and -5 and -1."""
    save_file({"q_filters": torch.tensor([[[-1.0, 0.0], [0.6, 0.8]]])}, tmp_path / "f.safetensors")
    keys = torch.tensor([[[[3.0, 4.0], [-1.0, 2.0]]]]).expand(1, 2, 2, 2)
    got = QFilters(str(tmp_path / "f.safetensors")).score(observed(keys), {})
    torch.testing.assert_close(got, torch.tensor([[[3.0, -1.0], [-5.0, -1.0]]]))


@torch.inference_mode()
def test_a_filter_is_the_main_direction_of_the_queries_away_from_them() -> None:
    """Against the singular vectors of the queries that transformers' own Llama makes of the texts."""
    running = tiny()
    found: list[list[Tensor]] = [[], []]

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
        queries = module.q_proj(given).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        found[module.layer_idx].append(apply_rotary_pos_emb(queries, queries, cos, sin)[0][0, :, 1:])

    hooks = [layer.self_attn.register_forward_pre_hook(note, with_kwargs=True) for layer in running.model.layers]
    for text in TEXTS:
        running(text[None])
    for hook in hooks:
        hook.remove()
    running.set_attn_implementation("kvbench")
    got = q_filters(running, TEXTS)
    for layer, queries in enumerate(torch.cat(some, dim=1) for some in found):  # [H_q,n,D]
        left, _, right = torch.linalg.svd(queries, full_matrices=False)
        toward = right[:, 0] * left[..., 0].sum(-1, keepdim=True).sign()
        expected = -toward.unflatten(0, (2, -1)).mean(1)
        torch.testing.assert_close(got[layer], expected.float(), rtol=1e-4, atol=1e-5)


def test_kept_tokens_equal_kvpress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, ids = presses().QFilterPress, prompt(70)
    monkeypatch.setattr(kind, "post_init_from_model", lambda press, model: None)  # which fetches filters
    for family in FAMILIES:
        running, path = small(family), tmp_path / f"{family}.safetensors"
        running.set_attn_implementation("kvbench")
        filters = q_filters(running, TEXTS)
        save_file({"q_filters": filters}, path)
        press = kind(compression_ratio=1 - 24.5 / 70)
        press.q_filters = filters
        theirs = press_keeps(running, ids, press)
        assert policy_keeps(running, ids, make_policy("qfilters", 24, filters=str(path))) == theirs, family


def test_the_policy_reads_the_files_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pocket.safetensors"
    assert main(["qfilters", "model=pocket", "task=niah", "task.lengths=[200]", "limit=2", "-o", str(path)]) == 0
    assert capsys.readouterr().out == f"2 texts -> {path}\n"
    filters = load_file(path)["q_filters"]
    assert filters.dim() == 3
    assert float(filters.norm(dim=-1).max()) <= 1 + 1e-6  # a mean of unit vectors
    assert make_policy("qfilters", 64, filters=str(path)).budget == 64
    assert main(["qfilters", "policy=snapkv", "-o", str(path)]) == 2
    assert "policy= has no effect here" in capsys.readouterr().err


def test_what_is_no_file_of_filters_is_refused(tmp_path: Path, file: Path) -> None:
    (tmp_path / "text.safetensors").write_text("no tensors")
    save_file({"other": torch.zeros(2)}, tmp_path / "other.safetensors")
    for given, sentence in (
        ("", "filters= must name a safetensors file with q_filters; create one with `kvbench calibrate"),
        (str(tmp_path / "none"), "filters=.*none is not a file"),
        (str(tmp_path / "text.safetensors"), "must be a safetensors file"),
        (str(tmp_path / "other.safetensors"), r"must contain q_filters \[layers, KV heads, head dim\]"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make_policy("qfilters", 20, filters=given)
    running = prepare(tiny(layers=3))
    with pytest.raises(ValueError, match="has 2 layers, 2 KV heads of 8 and does not match the model: layer 2 has 2"):
        generate_tokens(running, TEXTS[0][None], make_policy("qfilters", 20, filters=str(file)), max_new_tokens=1)
    with pytest.raises(ValueError, match="a text of one token has no query after its first"):
        q_filters(running, [torch.tensor([1])])
