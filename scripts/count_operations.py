"""Operations on tensors of a prefill, of blocks at the budget, of a decoded token and of another variant.

python scripts/count_operations.py [-o FILE.csv]. A GPU launches about one kernel for each; views are not counted. The
model has the layers and heads of Llama-3.1-8B, tiny ones, so that it runs on a CPU in minutes: the number of operations
does not depend on their size, apart from the number of layers that evict together: "as of 8,192 tokens" has as many as
then fit. As on a GPU, layers evict together, attention is summed in one piece (by about ten operations, where a GPU's
kernel is one), and slots are taken by `gather`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import kvbench
from kvbench import make_policy
from kvbench.cache.attend import TorchBackend, TritonBackend
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.sequence import Request, script_of
from kvbench.kernels import references, selection
from kvbench.kernels.devices import LARGE
from kvbench.policies.mergers import d2o
from kvbench.policies.policy import Policy
from kvbench.results.session import git_revision

LENGTH, BUDGET, BLOCK, LAYERS, PROMPTS = 768, 128, 64, 32, 8
WHOLE = ["full", "streamingllm", "snapkv", "h2o", "cake", "d2o"]
BLOCKS = ["streamingllm", "snapkv", "tova", "h2o", "caote_snapkv"]
SWEEP = ["streamingllm", "snapkv", "tova", "h2o", "caote_snapkv", "cake"]


ON_A_GPU = (  # what this device does otherwise
    (TorchBackend, "workspace", TritonBackend.workspace),
    (references, "LOGITS_AT_ONCE", LARGE),
    (references, "QUERIES_AT_ONCE", LARGE),
    (selection, "MANY", 2**62),
    (d2o, "SIMILARITIES_AT_ONCE", LARGE),
)


class Operations(TorchDispatchMode):
    """Counts the operations that are not views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def counted(call: Callable[[], object]) -> int:
    """The operations of a call."""
    operations = Operations()
    with operations:
        call()
    return operations.count


def tiny_llama() -> PreTrainedModel:
    """A random model of 32 layers, 32 query heads and 8 KV heads of 4 numbers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, head_dim=4, intermediate_size=64, vocab_size=256, num_hidden_layers=LAYERS,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=4096,
    )  # fmt: skip
    model: PreTrainedModel = LlamaForCausalLM(config).eval()
    model.set_attn_implementation("kvbench")
    return model


def request(length: int = LENGTH, seed: int = 0) -> Request:
    """A prompt of random tokens with eight new ones."""
    ids = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(seed))
    return Request(script_of(ids), 8, min_new_tokens=8)


def admission(model: PreTrainedModel, policies: list[Policy], length: int = LENGTH) -> tuple[int, DecodeBatch]:
    """The operations of the prefill and the evictions of some policies, and their batch."""
    batch = DecodeBatch(model)
    return counted(lambda: batch.admit([request(length)], policies)), batch


def block(model: PreTrainedModel, policy: Policy, prompts: int = 1) -> float:
    """The operations of a block at the budget, of one prompt or of several in one call."""
    asked = ([request(length, seed) for seed in range(prompts)] for length in (LENGTH - 2 * BLOCK, LENGTH))
    few, many = (counted(lambda some=some: DecodeBatch(model).admit(some, [policy])) for some in asked)
    return (many - few) / 2


def variant(model: PreTrainedModel, slugs: list[str]) -> float:
    """The operations that a further variant of one of these policies adds to a prefill, of six budgets of each."""
    variants = [make_policy(slug, BUDGET // 8 * share, schedule="prompt") for slug in slugs for share in range(4, 10)]
    return (admission(model, variants)[0] - admission(model, variants[:1])[0]) / (len(variants) - 1)


def long_prefill(model: PreTrainedModel, slug: str) -> int:
    """The operations of a prefill in which as many layers and similarities fit as of 8,192 tokens at a budget of 1,024.

    Then, keys and values are bfloat16 numbers, 128 of each head, instead of 4 in float32.
    """
    long, dim, budget = 8192, 128, 1024
    fits = TritonBackend.workspace * (LENGTH * 4 * 4) // (long * dim * 2)
    pairs = LARGE * ((LENGTH - BUDGET) * BUDGET) // ((long - budget) * budget)
    with patch.object(TorchBackend, "workspace", fits), patch.object(d2o, "SIMILARITIES_AT_ONCE", pairs):
        return admission(model, [make_policy(slug, BUDGET)])[0]


@torch.inference_mode()
def rows(model: PreTrainedModel) -> list[dict[str, Any]]:
    """What is counted, for which policy, and the operations: all and per layer."""
    found = []

    def note(what: str, policy: str, count: float) -> None:
        found.append({"what": what, "policy": policy, "operations": count, "per_layer": round(count / LAYERS, 1)})

    for slug in WHOLE:
        prefill, batch = admission(model, [make_policy(slug, None if slug == "full" else BUDGET)])
        batch.step()
        note("prefill", slug, prefill)
        note("decoded token", slug, counted(batch.step))
    for slug in ("h2o", "d2o"):
        note("prefill, as of 8192 tokens", slug, long_prefill(model, slug))
    for slug in BLOCKS:
        policy = make_policy(slug, BUDGET, schedule="blocks", block=BLOCK)
        note("block at the budget", slug, block(model, policy))
        note(f"block at the budget of {PROMPTS} prompts, for each", slug, block(model, policy, PROMPTS) / PROMPTS)
    for slugs in (*([slug] for slug in SWEEP), SWEEP):
        note(f"admission of {6 * len(slugs)} variants, each beyond the first", ", ".join(slugs), variant(model, slugs))
    return found


def main() -> None:
    """Print the table, and write it if asked."""
    for where, name, value in ON_A_GPU:
        setattr(where, name, value)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", help="a CSV file")
    given = parser.parse_args()
    table = pd.DataFrame(rows(tiny_llama())).round(1)
    sys.stdout.write(table.to_string(index=False) + "\n")
    if given.output:
        table.assign(revision=git_revision(Path(kvbench.__file__).resolve().parent), torch=torch.__version__).to_csv(
            given.output, index=False
        )


if __name__ == "__main__":
    main()
