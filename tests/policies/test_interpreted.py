"""Policies whose kernels Triton interprets keep what those of plain PyTorch keep."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

POLICIES: dict[str, dict[str, Any]] = {
    "h2o": {},
    "roco": {},
    "d2o": {},
    "snapkv": {"window": 6},
    "cake": {"window": 6},
    "p2a_h2o": {},
    "caote_h2o": {},
}
SLOW = ("kvec", "pyramidkv", "ada_snapkv", "caote_snapkv", "p2a_snapkv")


def run(slugs: tuple[str, ...], target: Path, family: str, interpret: bool) -> dict[str, Any]:
    """Positions that each layer keeps of a prompt and three tokens after it, by policy, in a process of its own."""
    support = Path(__file__).parents[1] / "support"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, __file__, target, family, *slugs],
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(support)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    if "only 0-dimensional arrays can be converted to Python scalars" in done.stderr:
        pytest.skip("the interpreter of this Triton cannot loop with this numpy")
    assert done.returncode == 0, done.stderr
    return torch.load(target)


def agree(slugs: tuple[str, ...], folder: Path, family: str) -> None:
    ours = run(slugs, folder / "triton.pt", family, interpret=True)
    theirs = run(slugs, folder / "torch.pt", family, interpret=False)
    assert ours.pop("interpreted")
    assert not theirs.pop("interpreted")
    assert set(ours) == set(slugs)
    for slug in slugs:
        assert all(torch.equal(a, b) for a, b in zip(ours[slug][0], theirs[slug][0], strict=True)), slug
        torch.testing.assert_close(ours[slug][1], theirs[slug][1], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_kernels_keep_what_pytorch_keeps(family: str, tmp_path: Path) -> None:
    agree((*POLICIES, *SLOW), tmp_path, family)


def _main(target: str, family: str, *slugs: str) -> None:
    from kv_models import prompt, tiny

    from kvbench import KVCache, make_policy
    from kvbench.kernels import jit

    model, ids = tiny(family, dtype=torch.float32), torch.tensor([prompt(64)])
    model.set_attn_implementation("kvbench")
    found: dict[str, Any] = {"interpreted": jit.INTERPRETED}
    for slug in slugs:
        fields = POLICIES.get(slug, {"window": 6, "extended": 9} if slug == "kvec" else {"window": 6})
        cache = KVCache(model.config, make_policy(slug, 36, **fields), prompt_length=60)
        with torch.no_grad():
            parts = [model(ids[:, :60], past_key_values=cache).logits]
            parts += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(60, 63)]
        found[slug] = [layer.positions.sort(-1).values for layer in cache.layers], torch.cat(parts, 1)
    torch.save(found, target)


if __name__ == "__main__":
    _main(*sys.argv[1:])
