"""Where the divergence comes from: against masked attention of transformers alone, for layers and heads."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from kv_models import prompt, tiny
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from kvbench import make_policy
from kvbench.cache.hook import prepare
from kvbench.engine.sequence import Request, script_of
from kvbench.policies.policy import Policy
from kvbench.tools.diagnose import main
from kvbench.tools.diagnostics import divergence
from kvbench.tools.diagnostics.probe import Probe

LAYERS, HEADS, SINKS, RECENT, NEW = 3, 2, 4, 12, 9
PROMPT = prompt(48)


def hides(decode: str, seen: int, place: int) -> bool:
    """Whether StreamingLLM has evicted the token at `place`, for the query after `seen` tokens."""
    first = (seen if decode == "evict" else len(PROMPT)) - RECENT
    return seen >= len(PROMPT) and SINKS <= place < first


def oracle(decode: str, whole: set[tuple[int, int]]) -> float:
    """Mean KL of the greedy answer under attention that hides evicted tokens, except in whole heads."""

    def attend(
        module: nn.Module, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, **_: object
    ) -> tuple[Tensor, None]:
        group = queries.shape[1] // keys.shape[1]
        weights = queries @ keys.repeat_interleave(group, 1).mT * scaling
        seen = keys.shape[2] - queries.shape[2]  # tokens before those of the call
        later = torch.arange(keys.shape[2]) > seen + torch.arange(queries.shape[2])[:, None]
        weights = weights.masked_fill(later, -torch.inf)
        for head in range(keys.shape[1]) if hiding and queries.shape[2] == 1 else ():
            if (module.layer_idx, head) not in whole:
                gone = [place for place in range(seen) if hides(decode, seen, place)]
                weights[:, head * group : (head + 1) * group, :, gone] = -torch.inf
        return (weights.softmax(-1) @ values.repeat_interleave(group, 1)).transpose(1, 2), None

    AttentionInterface.register("hiding", attend)
    model = tiny(layers=LAYERS).double()
    model.set_attn_implementation("hiding")
    logs, answer = {}, []
    with torch.inference_mode():
        for hiding in (False, True):
            cache = DynamicCache(config=model.config)
            rows = [model(torch.tensor([PROMPT]), past_key_values=cache).logits[0, -1]]
            for step in range(NEW - 1):
                if not hiding:
                    answer.append(int(rows[-1].argmax()))
                rows.append(model(torch.tensor([[answer[step]]]), past_key_values=cache).logits[0, -1])
            logs[hiding] = torch.stack(rows).log_softmax(-1)
    return float((logs[False].exp() * (logs[False] - logs[True])).sum(-1).mean())


def probe(policy: Policy, model: PreTrainedModel | None = None, heads: bool = False) -> Probe:
    ids = torch.tensor([PROMPT])
    model = prepare(tiny(layers=LAYERS).double()) if model is None else model
    return Probe(model, ids, policy, policy.name, request=Request(script_of(ids), NEW), heads=heads)


def streaming(decode: str) -> Policy:
    return make_policy("streamingllm", budget=SINKS + RECENT, decode=decode, sinks=SINKS)


@pytest.mark.parametrize("decode", ["grow", "evict"])
def test_a_whole_layer_takes_away_what_masked_attention_says(decode: str) -> None:
    rows = divergence.measure(probe(streaming(decode)))
    base = oracle(decode, set())
    assert base > 1e-4
    assert [row["layer"] for row in rows] == list(range(LAYERS))
    for row in rows:
        kl = oracle(decode, {(row["layer"], head) for head in range(HEADS)})
        assert row["kl"] == pytest.approx(base, rel=1e-4)
        assert row["kl_whole"] == pytest.approx(kl, rel=1e-4)
        assert row["removed"] == pytest.approx(base - kl, rel=1e-3, abs=1e-9)


def test_a_whole_head_takes_away_what_masked_attention_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "AT_ONCE", 4)  # several batches
    rows = divergence.measure(probe(streaming("grow"), heads=True))
    assert [(row["layer"], row["head"]) for row in rows] == [(i, h) for i in range(LAYERS) for h in range(HEADS)]
    for row in rows:
        assert row["kl_whole"] == pytest.approx(oracle("grow", {(row["layer"], row["head"])}), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "decode"),
    [
        *((name, "grow") for name in ("h2o", "pyramidkv", "ada_snapkv", "caote_snapkv", "chunkkv_snapkv")),
        *((name, "evict") for name in ("snapkv", "cake", "global_snapkv", "caote_snapkv", "d2o")),
    ],
)
def test_all_layers_but_one_are_those_of_the_policy(name: str, decode: str) -> None:
    """In a model of one layer, a whole layer is the full cache, whatever scores, divides or merges the tokens."""
    policy = make_policy(name, budget=36, decode=decode, schedule="prompt")
    (row,) = divergence.measure(probe(policy, prepare(tiny(layers=1, seed=1).double())))
    assert row["kl"] > 1e-6
    assert row["kl_whole"] == pytest.approx(0, abs=1e-12)
    several = divergence.measure(probe(policy))
    assert all(other["kl_whole"] >= 0 for other in several)
    assert len({other["kl_whole"] for other in several}) == LAYERS


def test_a_whole_layer_of_a_quantized_cache_is_exact() -> None:
    policy = make_policy("int4")
    (row,) = divergence.measure(probe(policy, prepare(tiny(layers=1, seed=1).float())))
    assert row["kl"] > 1e-9
    assert row["kl_whole"] == 0


def test_it_draws_layers_and_heads() -> None:
    layers = pd.DataFrame(divergence.measure(probe(streaming("grow")))).assign(example=0)
    table = pd.concat([layers.assign(policy="a"), layers.assign(policy="b")])
    figure = Figure()
    divergence.draw(table, figure)
    assert figure.axes[0].images[0].get_array().shape == (2, LAYERS)
    heads = table.assign(head=0).pipe(lambda t: pd.concat([t, t.assign(head=1)]))
    figure = Figure()
    divergence.draw(heads, figure)
    assert [axes.get_title(loc="left") for axes in figure.axes[:2]] == ["a", "b"]
    assert figure.axes[0].images[0].get_array().shape == (2, LAYERS)
    divergence.draw(table.assign(kl=0.0, removed=0.0), Figure())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (["policy=full"], "policy=full keeps every token exactly, so its KL is 0"),
        (["policy=snapkv", "schedule=blocks", "decode=evict"], "one prefill cannot serve all: use schedule=prompt"),
        (["policy=quest"], "policy=quest does not hold its tokens layer by layer"),
        (["policy=gemfilter", "policy.pre_pass.layer=1"], "policy=gemfilter does not hold its tokens layer by layer"),
        (
            ["policy=kvpress", "policy.press={_target_: kvpress.KnormPress}"],
            "policy=kvpress does not hold its tokens layer by layer",
        ),
        (["policy=h2o", "--heads"], "cannot keep a single head whole: --heads needs decode=grow"),
        (["policy=int4", "--heads"], "cannot keep a single head whole"),
        (["policy=snapkv", "compress=context"], "kvbench: policy=snapkv: no layer can be exchanged before a question"),
        (["policy=snapkv", "generation.temperature=0.5"], "compares with the greedy answer of the full cache"),
        (
            ["policy=snapkv", "task.divergence=false"],
            "task.divergence=false has no effect: the diagnostic sets it",
        ),
    ],
)
def test_what_cannot_be_exchanged_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, fields: list[str], said: str
) -> None:
    budget = [] if fields[0] in ("policy=full", "policy=int4") else ["budget=64"]
    assert main(["divergence", *fields, *budget, f"out={tmp_path}"]) != 0
    assert said in capsys.readouterr().err


def test_other_diagnostics_have_no_heads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coverage", "--heads", "policy=snapkv", "budget=64"]) != 0
    assert "--heads has no effect on coverage" in capsys.readouterr().err


def test_the_command_writes_table_and_figure(tmp_path: Path) -> None:
    short = ["task.lengths=[300]", "task.max_new_tokens=4", "policy=snapkv", "budget=40", f"out={tmp_path}"]
    assert main(["divergence", *short, "--heads"]) == 0
    table = pd.read_csv(tmp_path / "diagnostics" / "divergence.csv")
    assert list(table) == ["policy", "example", "layer", "head", "kl", "kl_whole", "removed"]
    assert (tmp_path / "diagnostics" / "divergence.png").stat().st_size > 0
