"""Blocks of a prompt that are recorded and replayed equal the blocks themselves, and no block at the budget waits."""

from typing import Any

import pytest
import torch
from kv_models import prompt as words
from kv_models import tiny
from kv_presets import kinds
from kv_runs import finish
from kv_watch import Ledger, ledger_of
from op_tape import Tape, record
from parameters import few_fast

from kvbench import make_policy
from kvbench.cache.attend.triton import TritonBackend
from kvbench.cache.hook import prepare
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.recorder import Recorder, blocks_alike
from kvbench.engine.sequence import LiveSequence, Request, script_of
from kvbench.policies.policy import Policy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET, BLOCK, LENGTH = 40, 16, 230
WHOLE_PAGES = ("pagedeviction",)  # evict whole pages, so that blocks leave different numbers of tokens


def policy_of(slug: str, budget: int = BUDGET) -> Policy:
    window = {"window": 6} if slug.endswith(("snapkv", "pyramidkv")) else {}
    return make_policy(slug, budget, schedule="blocks", block=BLOCK, **window)


def recordable() -> list[str]:
    """Presets whose blocks are alike; on a CPU, the host reads numbers for sums over a block's queries."""
    found = []
    for slug in kinds():
        try:
            policy = policy_of(slug)
            if blocks_alike(policy) and (DEVICE == "cuda" or policy.needs.sums is None):
                found.append(slug)
        except ValueError:
            continue  # a policy that needs the whole prompt
    return found


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are recorded by `op_tape` where there is no GPU, and the code takes the paths of a GPU."""
    monkeypatch.setattr(Tape, "replays", 0)
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
        monkeypatch.setattr(torch.cuda, "graph", record)
        monkeypatch.setattr("kvbench.cache.attend.backend_of", lambda like: TritonBackend())
        monkeypatch.setattr("kvbench.kernels.selection.on_host", lambda x: False)


def run(policies: list[Policy], recorded: bool) -> list[LiveSequence]:
    model = prepare(tiny(dtype=torch.float32).to(DEVICE))
    batch = DecodeBatch(model)
    batch._blocks = Recorder(model) if recorded else None
    script = script_of(torch.tensor([words(LENGTH)], device=DEVICE))
    sequences = batch.admit([Request(script, 4, watch=(Ledger(),))], policies)[0]
    finish(batch)
    for sequence in sequences:
        if sequence.error is not None:
            raise sequence.error
    return sequences


def contents(sequence: LiveSequence) -> list[Any]:
    layers = sequence.cache.sequence.layers
    counts = [(layer.count, layer.footprint, layer.nbytes) for layer in layers]
    shown = ledger_of(sequence.cache.sequence)
    return [sequence.tokens, shown, sequence.cache.peak_nbytes, counts, [layer.positions.tolist() for layer in layers]]


@pytest.mark.parametrize("slug", few_fast(recordable(), recordable()[::2], pytest.mark.slow("replays every kind")))
@pytest.mark.usefixtures("tape")
def test_replayed_blocks_equal_called_ones(slug: str) -> None:
    (called,), (replayed,) = run([policy_of(slug)], False), run([policy_of(slug)], True)
    assert contents(replayed) == contents(called)
    if DEVICE == "cpu" and slug not in WHOLE_PAGES:
        assert Tape.replays >= 8, "of 14 blocks before the last one"
    for x, y in zip(called.cache.sequence.layers, replayed.cache.sequence.layers, strict=True):
        close = 0 if DEVICE == "cpu" else 1e-5  # the blocks of the first call are multiplied together
        torch.testing.assert_close(x.store.keys, y.store.keys, rtol=close, atol=close)


@pytest.mark.usefixtures("tape")
def test_several_policies_are_one_recorded_block() -> None:
    policies = [policy_of("snapkv"), policy_of("caote_snapkv", 56), policy_of("tova", 48)]
    assert list(map(contents, run(policies, True))) == list(map(contents, run(policies, False)))


@pytest.mark.usefixtures("tape")
@pytest.mark.skipif(DEVICE == "cuda", reason="makes a recording fail with the stand-in for CUDA graphs")
@pytest.mark.parametrize("strict", [True, False])
def test_a_block_that_cannot_be_recorded_is_an_error_or_a_warning(
    strict: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = contents(run([policy_of("snapkv")], False)[0])
    monkeypatch.setattr("op_tape.waits", lambda func, args: func.name().startswith("aten::cat"))
    if strict:
        with pytest.raises(ValueError, match=r"block of a prompt on LlamaForCausalLM cannot be recorded .*cuda_graph"):
            run([policy_of("snapkv")], True)
        return
    monkeypatch.setattr(Recorder.__init__, "__defaults__", (False,))
    assert contents(run([policy_of("snapkv")], True)[0]) == expected
    assert "cannot be recorded" in caplog.text
