"""Pre-passes by our loop: shared by variants, over a context as over a prompt, counted, and refused in a sentence."""

from pathlib import Path

import pytest
import torch
from kv_models import CodePoints, prompt
from kv_runs import assert_alone, finish
from small_cells import small_cell
from transformers import PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.compute import compute_runs
from kvbench.engine.generate import generate_tokens
from kvbench.engine.sequence import Request, script_of
from kvbench.results.columns import frame
from kvbench.results.loading import read_result

LENGTH, BUDGET, NEW = 60, 20, 3
IDS = torch.tensor([prompt(LENGTH)])
WORDS = CodePoints()


def test_budgets_share_one_pre_pass_and_keep_equal_tokens_alone(model: PreTrainedModel) -> None:
    called: list[torch.Tensor | None] = []
    policies = [make_policy(slug, b, chunk=40) for slug in ("kvzip", "kvzip_layerwise") for b in (16, 24)]
    policies += [make_policy("kvzip", 16, chunk=30), make_policy("sirllm", 16), make_policy("tova", 16)]
    flight = DecodeBatch(model)
    hook = model.base_model.register_forward_hook(
        lambda _, args, kwargs, out: called.append(kwargs.get("input_ids")), with_kwargs=True
    )
    rows = flight.admit([Request(script_of(IDS), NEW, encoder=WORDS)], policies)[0]
    hook.remove()
    finish(flight)
    read = [ids for ids in called if ids is not None]  # sirllm asks the head for logits of hidden states
    assert len(read) == 1 + 2 + 2  # the prompt; two passes of 40 tokens for four variants; two of 30 for another
    for row in rows:
        assert_alone(model, row)


def test_the_tokens_of_pre_passes_are_a_column(tiny_model: Path, tmp_path: Path) -> None:
    cells = [small_cell(tmp_path, tiny_model, slug, 40, "limit=1") for slug in ("kvzip", "sirllm", "tova")]
    assert compute_runs(cells) == [None] * 3
    column = frame([read_result(cell.folder) for cell in cells], ["prompt_tokens", "pre_pass_tokens"])
    assert column["pre_pass_tokens"][0] > column["prompt_tokens"][0]
    assert column["pre_pass_tokens"].isna().tolist() == [False, False, True]
    assert column["pre_pass_tokens"][1] == 0


def test_a_choice_of_the_prompt_counts_its_shallow_pass(model: PreTrainedModel) -> None:
    done = generate_tokens(model, IDS, make_policy("gemfilter", BUDGET, layer=1), max_new_tokens=1)
    assert done.cache.sequence.passed == LENGTH


def test_a_loop_that_makes_no_pre_pass_is_refused(model: PreTrainedModel) -> None:
    cache = KVCache(model.config, make_policy("kvzip", BUDGET))
    with pytest.raises(ValueError, match=r"^kvzip needs an extra forward pass over the prompt .*kvbench\.generate$"):
        model.generate(IDS, past_key_values=cache, max_new_tokens=2)
