"""The model type `kvbench` against lm-eval's own `hf`: equal with the full cache, and different where it is small."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from tokenizers.processors import TemplateProcessing

from kvbench.tools.harness_model import KVBenchLM

TEXT = "In spring the river rises over the meadow, and the miller's cat sits on the roof until the water falls. "
UNTIL: dict[str, Any] = {"until": ["\n\n"], "do_sample": False, "max_gen_toks": 24}


@pytest.fixture(scope="module")
def full(tiny_model: Path) -> KVBenchLM:
    return KVBenchLM(str(tiny_model), device="cpu")


@pytest.fixture(scope="module")
def hf(tiny_model: Path) -> HFLM:
    return HFLM(pretrained=str(tiny_model), device="cpu", dtype="float32", batch_size=1)


def generation(*contexts: str, **kwargs: Any) -> list[Instance]:
    return [Instance("generate_until", {}, (context, {**UNTIL, **kwargs}), 0) for context in contexts]


def rating(*pairs: tuple[str, str]) -> list[Instance]:
    return [Instance("loglikelihood", {}, pair, 0) for pair in pairs]


def test_an_import_makes_the_model_known_to_lm_eval() -> None:
    assert get_model("kvbench") is KVBenchLM


def test_answers_are_those_of_hf(full: KVBenchLM, hf: HFLM) -> None:
    requests = generation(TEXT, "Question: 1+1?\nAnswer:", TEXT[::-1])
    answers = full.generate_until(requests, disable_tqdm=True)
    assert answers == hf.generate_until(requests, disable_tqdm=True)
    assert all(answers)


def test_a_stop_string_of_several_tokens_ends_the_answer_before_it(full: KVBenchLM, hf: HFLM) -> None:
    (whole,) = full.generate_until(generation(TEXT), disable_tqdm=True)
    stop = whole[5:9]  # one token per byte: these are four
    (cut,) = full.generate_until(generation(TEXT, until=[stop]), disable_tqdm=True)
    assert cut == whole[: whole.index(stop)]
    assert [cut] == hf.generate_until(generation(TEXT, until=[stop]), disable_tqdm=True)


def test_a_long_context_is_cut_on_the_left_as_in_hf(full: KVBenchLM, hf: HFLM) -> None:
    requests = generation(TEXT * 20)  # 2,080 bytes for 1,024 positions
    assert full.generate_until(requests, disable_tqdm=True) == hf.generate_until(requests, disable_tqdm=True)


PAIRS = [
    ("The cat sits on the", " roof"),
    ("The cat sits on the ", "roof"),  # the space belongs to the continuation
    ("", "The cat"),
    ("", "<s>The cat"),
    (TEXT * 12, " and the cat sits on the roof."),  # cut on the left
    (TEXT, "x"),
]


def test_loglikelihoods_are_those_of_hf(full: KVBenchLM, hf: HFLM) -> None:
    ours = full.loglikelihood(rating(*PAIRS), disable_tqdm=True)
    theirs = hf.loglikelihood(rating(*PAIRS), disable_tqdm=True)
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-4)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


def test_an_eos_that_the_tokenizer_appends_changes_nothing(full: KVBenchLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> tuple[Any, Any]:
        scores = full.loglikelihood(rating(*PAIRS[:2]), disable_tqdm=True)
        return full.generate_until(generation(TEXT), disable_tqdm=True), scores

    before, raw = answers(), full.tokenizer.backend_tokenizer
    ends = [(name, full.tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "</s>")]
    monkeypatch.setattr(raw, "post_processor", TemplateProcessing(single="<s> $A </s>", special_tokens=ends))
    assert full.tokenizer.encode("a")[-1] == ends[1][1], "else nothing is removed"
    assert answers() == before


def test_a_small_budget_evicts_and_is_reported(tiny_model: Path, full: KVBenchLM) -> None:
    small = KVBenchLM(str(tiny_model), policy="snapkv", budget=16, device="cpu", window=8, decode="evict")
    request = rating((TEXT, " and the cat sits on the roof."))
    (compressed,), (dense,) = (lm.loglikelihood(request, disable_tqdm=True) for lm in (small, full))
    assert abs(compressed[0] - dense[0]) > 1e-3
    small.loglikelihood(rating(("short", " one")), disable_tqdm=True)
    info = small.get_model_info()
    assert info["requests"] == 2
    assert info["requests_with_eviction"] == 0.5
    # 16 of the 135 tokens of the first request stay, all 9 of the second ("<s>short one" without its last).
    assert info["kept_tokens"] == (16 + 9) / 2
    assert info["budget"] == 16
    assert info["policy"]["scorer"]["window"] == 8


def test_sampling_is_refused(full: KVBenchLM) -> None:
    with pytest.raises(ValueError, match="decodes greedily"):
        full.generate_until(generation(TEXT, do_sample=True, temperature=1.0), disable_tqdm=True)


def test_random_draws_depend_on_the_context_the_answer_and_the_seed(tiny_model: Path) -> None:
    kept = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)  # as lm-eval's --seed does
        lm = KVBenchLM(str(tiny_model), policy="random", budget=32, device="cpu")
        ids = torch.tensor([lm.tok_encode(text) for text in (TEXT, TEXT, TEXT[::-1])])
        draws = lm._model_generate(ids, ids.shape[1] + 2, [])[:, ids.shape[1] :]
        examples = [lm._example(row) for row in ids.tolist()]
        kept.append((draws.tolist(), examples, lm.loglikelihood(rating((TEXT, " and"), (TEXT, " and")))))
    assert kept[0] == kept[2]
    assert kept[0][2][0] == kept[0][2][1]
    assert kept[0][2] != kept[1][2]
    assert len({*kept[0][1], *kept[1][1]}) == 4
