"""Compute the runs of `results/smollm2`: python scripts/smollm2_pack.py FOLDER [TABLE ...] [--limit N].

Each table is a sweep of `python -m kvbench` with one schedule and one decoding rule. Finished runs
are skipped, and a larger limit continues them. `scripts/smollm2_tables.py` writes tables and figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

NEEDLES = ("task=niah", "task.max_new_tokens=20")
ONCE = ("schedule=prompt", "decode=grow")
"""Evict once after the whole prompt; keep all decoded tokens."""


@dataclass(frozen=True)
class Table:
    """A sweep: policies, budgets, task and further fields, and the number of examples."""

    policies: str
    budgets: str
    fields: tuple[str, ...]
    limit: int
    folder: str | None = None  # the folder of another table, to which these runs are added

    def command(self, folder: Path, limit: int | None, data: Path) -> list[str]:
        """The command line that computes it."""
        fields = [field.format(data=data, passages=folder.parent / "passages.jsonl") for field in self.fields]
        swept = [f"policy={self.policies}", f"budget={self.budgets}", f"limit={limit or self.limit}"]
        return [sys.executable, "-m", "kvbench", "-m", "model=smollm2", *fields, *swept, f"out={folder}"]


RULER = ("task.length=2048", "task.data_dir={data}/pg_essays", "task.max_new_tokens=32", *ONCE)
MOBY = ("task=perplexity", "task.data_dir={passages}", "task.length=1536", "task.block=128")

TABLES = {
    "needles": Table(
        "full,streamingllm,random,knorm,keydiff,expected_attention,h2o,h2o_norecent,tova,roco,snapkv,pyramidkv,cake,"
        "d2o,kvec,ada_snapkv,caote_h2o,fastcaote_h2o,caote_tova,fastcaote_tova,caote_snapkv,fastcaote_snapkv",
        "128,256,512,1024",
        (*NEEDLES, *ONCE),
        20,
    ),
    "needles_variants": Table(
        "caote_roco,caote_pyramidkv,caote_knorm,caote_keydiff,caote_cake,fastcaote_roco,fastcaote_pyramidkv,"
        "fastcaote_knorm,fastcaote_keydiff,fastcaote_cake,ada_pyramidkv,ada_h2o,ada_tova,ada_roco,ada_knorm,ada_keydiff",
        "512,1024",
        (*NEEDLES, *ONCE),
        20,
        "needles",
    ),
    "needles_others": Table(
        "local_window,cam,sirllm,simlayerkv,lagkv,leverage,compactor,curdkv,noncausal,rkv,chunkkv_snapkv,"
        "critical_snapkv,critical_h2o,p2a_snapkv,p2a_h2o,p2a_tova",
        "512,1024",
        (*NEEDLES, *ONCE),
        10,
        "needles",
    ),
    "needles_context": Table(
        "full,streamingllm,random,knorm,expected_attention,h2o,tova,snapkv,pyramidkv,cake,kvec,ada_snapkv,caote_snapkv",
        "128,256,512,1024",
        (*NEEDLES, *ONCE, "compress=context"),
        20,
    ),
    "context_kvzip": Table("kvzip", "256,1024", (*NEEDLES, *ONCE, "compress=context"), 10, "needles_context"),
    "ruler_full": Table(
        "full",
        "512",
        (
            "task=ruler/niah_single_1,ruler/niah_single_2,ruler/niah_single_3,ruler/niah_multikey_1,"
            "ruler/niah_multikey_2,ruler/niah_multikey_3,ruler/niah_multivalue,ruler/niah_multiquery,ruler/vt,"
            "ruler/cwe,ruler/fwe",
            *RULER,
            "task.max_new_tokens=48",
        ),
        5,
    ),
    "ruler": Table(
        "full,streamingllm,h2o,tova,snapkv,ada_snapkv,caote_snapkv,cake,keydiff,kvec",
        "128,256,512,1024",
        ("task=ruler/niah_single_2,ruler/niah_multikey_1", *RULER),
        25,
    ),
    "ruler_context": Table(
        "full,streamingllm,h2o,tova,snapkv,ada_snapkv,caote_snapkv,cake,keydiff,kvec",
        "128,256,512,1024",
        ("task=ruler/niah_single_2,ruler/niah_multikey_1", *RULER, "compress=context"),
        10,
    ),
    "stores": Table(
        "full,fp8,int8,nvfp4,kivi,kivi_int4,ott,gear_g64,zipcache,kcvc,turboquant,turboquant_b3,turboquant_b2,snapkv,"
        "snapkv_fp8,snapkv_kivi_int4",
        "512",
        (*NEEDLES, *ONCE),
        20,
    ),
    "stores_kvzip": Table("kvzip,kvzip_fp8", "512", (*NEEDLES, *ONCE), 10, "stores"),
    "multi_news": Table(
        "full,streamingllm,h2o,snapkv,caote_snapkv,cake",
        "512",
        (
            "task=longbench/multi_news",
            "task.data_dir={data}/longbench",
            "task.max_new_tokens=64",
            "model.max_prompt_tokens=2048",
            *ONCE,
        ),
        30,
    ),
    "perplexity": Table(
        "full,streamingllm,random,knorm,h2o,tova,snapkv,caote_h2o,caote_snapkv",
        "128,512",
        MOBY,
        3,
    ),
    "perplexity_stores": Table(
        "full,fp8,int8,nvfp4,kivi,kivi_int4,ott,gear_g64,zipcache,kcvc,turboquant,snapkv,snapkv_fp8,kvzip,kvzip_fp8",
        "512",
        ("task=perplexity", "task.data_dir={passages}", "task.length=1408", "task.prompt_tokens=1280", *ONCE),
        3,
    ),
}


def passages(book: Path, file: Path, count: int = 10, characters: int = 9000) -> None:
    """Write passages of a book at equal distances, one JSON object per line, to a file that perplexity reads."""
    text = book.read_text(encoding="utf-8")
    starts = [text.index("\n\n", (index + 1) * len(text) // (count + 2)) + 2 for index in range(count)]
    rows = [json.dumps({"text": text[start : start + characters]}) for start in starts]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")


def main() -> int:
    """Run the tables one after the other; stop at the first failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tables", nargs="*", default=list(TABLES))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="with books/ and longbench/")
    given = parser.parse_args()
    passages(given.data / "books/moby_dick.txt", given.folder / "passages.jsonl")
    for name in given.tables:
        folder = given.folder / (TABLES[name].folder or name)
        command = TABLES[name].command(folder, given.limit, given.data)
        print(f"{name}: {' '.join(command[1:])}", flush=True)
        failed = subprocess.run(command, check=False).returncode
        if failed:
            return failed
    return 0


if __name__ == "__main__":
    sys.exit(main())
