"""Decode a tiny Llama with quantised stores: `python kv_decode_stores.py out.pt`; the kernels run where Triton does."""

import sys

import torch
from kv_models import left_padded, prompt, tiny

from kvbench import make_policy
from kvbench.attention import prepare
from kvbench.generate import greedy
from kvbench.policies.stores import quantised

STORES = {
    "kivi": {"group": 8, "residual": 16},
    "kivi_whole": {"group": 128, "residual": 128, "bits": 2},
    "ott": {"group": 8, "residual": 5, "auxiliary": 4, "skip_layers": [0]},
    "kcvc": {"group": 8, "residual": 8},
}
launches: list[str] = []


def counted(name: str) -> None:
    """Note every call of a kernel's launcher that the stores make."""
    launch = getattr(quantised, name)
    setattr(quantised, name, lambda *args: (launches.append(name), launch(*args))[1])


def main() -> None:
    """Tokens of every store for a batch of two prompts, one of them padded; how often the kernels were launched."""
    counted("quantised_attention_triton")
    model = prepare(tiny("llama").float())
    ids, mask = left_padded([prompt(140, seed=1), prompt(33, seed=2)])
    out = {}
    launches.clear()
    for name, fields in STORES.items():
        policy = make_policy(name.removesuffix("_whole"), **fields)
        done = greedy(model, ids, policy, attention_mask=mask, max_new_tokens=6)
        layer = done.cache.layers[1]
        out[name] = (done.tokens, layer.keys, layer.values, len(launches))
        launches.clear()
    torch.save(out, sys.argv[1])


main()
