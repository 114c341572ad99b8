"""Presets end to end: what the kernels of an eviction keep is what PyTorch keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
from eviction_kernels import interpreted
from eviction_runs import SYSTEMS, kept

FAST = ["caote_snapkv"]


@pytest.mark.parametrize(
    "slugs", [FAST, pytest.param([slug for slug in SYSTEMS if slug not in FAST], marks=pytest.mark.slow)]
)
def test_kernels_keep_what_pytorch_keeps(slugs: list[str], tmp_path: Path) -> None:
    calls = {slug: ("eviction_runs", "kept", {"slug": slug}) for slug in slugs}
    from_kernels = interpreted(calls, tmp_path)
    for slug in slugs:
        expected = kept(slug)
        assert from_kernels[slug]["tokens"] == expected["tokens"], slug
        assert from_kernels[slug]["kept"] == expected["kept"], slug
        assert from_kernels[slug]["kernels"], "the process that interprets must use the kernels"
        assert not expected["kernels"], "this one must not"
