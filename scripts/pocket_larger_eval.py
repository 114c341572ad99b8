"""Full-cache scores of the larger pocket model right after training, batched, within a number of seconds."""

from __future__ import annotations

import json
import logging
import multiprocessing as mp
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from pocket_data import BOS, EOS, PAD, tokenizer
from pocket_tasks import tasks
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvbench.tasks.task import Example, Task

log = logging.getLogger("train_pocket")
LENGTHS = (4096, 1024, 2048, 512)  # in the order of interest
SEED = 42


@dataclass(frozen=True)
class Plain:
    """The pocket tokenizer as kvbench's tasks see one."""

    def encode(self, text: str) -> list[int]:
        """Ids without BOS."""
        return tokenizer().encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""
        return tokenizer().decode(ids)


@dataclass(frozen=True)
class Cell:
    """The questions of one task at one length; rows: ids of BOS, prompt and answer prefix."""

    task: Task
    length: int
    examples: list[Example]
    rows: list[list[int]]

    @property
    def most(self) -> int:
        """New tokens that hold every right answer and what stands between its parts, at most what the task allows."""
        longest = max(len(Plain().encode(" ".join(example.references))) for example in self.examples)
        return min(self.examples[0].max_new_tokens, 3 * longest + 12)


def ask(length: int, which: int, limit: int) -> Cell | None:
    """Task number `which` at this length; None for a length that it cannot have."""
    task = list(tasks(length, repeats=-(-limit // 10)))[which]
    try:
        examples = list(task.examples(Plain(), SEED, limit))
    except ValueError:
        return None
    rows = [[BOS, *Plain().encode(example.prompt + example.answer_prefix)] for example in examples]
    return Cell(task, length, examples, rows)


class Questions:
    """All cells, written by two processes while the model trains."""

    def __init__(self, limit: int, lengths: tuple[int, ...] = LENGTHS) -> None:
        self.pool = ProcessPoolExecutor(2, mp_context=mp.get_context("fork"))
        count = len(list(tasks(4096)))
        self.coming = [self.pool.submit(ask, length, which, limit) for length in lengths for which in range(count)]

    def collect(self) -> list[Cell]:
        """The cells, waiting for those still to come."""
        cells = [future.result() for future in self.coming]
        self.pool.shutdown()
        return [cell for cell in cells if cell is not None]


@torch.no_grad()
def answers(model: PreTrainedModel, cell: Cell, at_once: int = 50) -> Iterator[str]:
    """Greedy continuations, rows padded on the left."""
    for start in range(0, len(cell.rows), at_once):
        rows = cell.rows[start : start + at_once]
        width = max(map(len, rows))
        ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows], device=model.device)
        out = model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=(ids != PAD).long(),
            max_new_tokens=cell.most,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
        yield from (Plain().decode(new) for new in out[:, width:].tolist())


def evaluate(folder: Path, cells: list[Cell], out: Path, device: str, seconds: float) -> bool:
    """Write scores by task and length, in float32 as the model is used; whether all cells have one.

    Those that `out` has stay as they are; those for which there is no time are left out.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"seed": SEED, "scores": {}, "samples": {}}
    began = time.perf_counter()
    todo = [cell for cell in cells if str(cell.length) not in found["scores"].get(cell.task.name, {})]
    for done, cell in enumerate(todo):
        if time.perf_counter() - began > seconds:
            log.warning("no time is left for %d cells, from %s at %d on", len(todo) - done, cell.task.name, cell.length)
            return False
        told = list(answers(model, cell))
        got = [cell.task.score(text, example) for text, example in zip(told, cell.examples, strict=True)]
        found["scores"].setdefault(cell.task.name, {})[str(cell.length)] = sum(got) / len(got)
        found["samples"][f"{cell.task.name} {cell.length}"] = [
            (text, example.references) for text, example in zip(told[:3], cell.examples, strict=False)
        ]
        found["limit"] = len(cell.rows)
        log.info("%-26s %5d  %.3f", cell.task.name, cell.length, sum(got) / len(got))
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return True
