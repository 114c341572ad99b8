"""Full-cache scores of a pocket model by transformers' own `generate`: `python scripts/eval_pocket.py kvbench/pocket`.

Writes one JSON file and prints the table of the model card. Prompts come from kvbench's tasks, with a seed and random
streams that training never used.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvbench.tasks.arithmetic import Arithmetic
from kvbench.tasks.niah import Niah
from kvbench.tasks.ruler.common_words import CommonWords
from kvbench.tasks.ruler.frequent_words import FrequentWords
from kvbench.tasks.ruler.niah import RulerNiah
from kvbench.tasks.ruler.variable_tracking import VariableTracking
from kvbench.tasks.task import Example, PlainTokenizer, Task

log = logging.getLogger("eval_pocket")
LENGTHS = (512, 1024, 2048, 3072, 4096)


def tasks(length: int, repeats: int = 2) -> Iterator[Task]:
    """The task niah in several forms, RULER's offline tasks, arithmetic. repeats: of each of niah's ten depths."""
    grid = {"lengths": (length,), "repeats": repeats}
    yield Niah(**grid)
    yield Niah(name="niah_noise", haystack="noise", **grid)
    yield Niah(name="niah_multikey", keys=8, **grid)
    yield Niah(name="niah_multiquery", keys=8, queries=4, max_new_tokens=64, **grid)
    yield Niah(name="niah_multivalue", values=4, max_new_tokens=64, **grid)
    yield RulerNiah(name="ruler niah_single_1", length=length)
    yield RulerNiah(name="ruler niah_multikey_2", length=length, haystack="needle")
    yield RulerNiah(name="ruler niah_multikey_3", length=length, haystack="needle", key="uuids", value="uuids")
    yield RulerNiah(name="ruler multivalue, noise", length=length, values=4)
    yield RulerNiah(name="ruler multiquery, noise", length=length, keys=4, queries=4)
    yield VariableTracking(name="ruler vt", length=length)
    yield CommonWords(name="ruler cwe", length=length)
    yield FrequentWords(name="ruler fwe", length=length)
    yield Arithmetic(**grid)


@torch.no_grad()
def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, example: Example) -> str:
    """The greedy continuation of one prompt."""
    inputs = tokenizer(example.prompt + example.answer_prefix, return_tensors="pt").to(model.device)
    out = model.generate(  # type: ignore[operator]
        **inputs, max_new_tokens=example.max_new_tokens, do_sample=False
    )
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def evaluate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, seed: int, limit: int) -> float:
    """Mean score of the task's first `limit` examples."""
    scores = []
    for example in task.examples(PlainTokenizer(tokenizer), seed, limit):
        output = answer(model, tokenizer, example)
        scores.append(task.score(output, example))
        log.debug("%s %s: %r for %s", task.name, scores[-1], output, example.references)
    return sum(scores) / len(scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with model and tokenizer")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--tasks", nargs="+", help="names to keep, by default all")
    parser.add_argument("--limit", type=int, default=20, help="examples of each task and length")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="JSON file for the scores")
    parser.add_argument("--verbose", action="store_true", help="log every answer")
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.DEBUG if args.verbose else logging.INFO)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    cells = [(n, task) for n in args.lengths for task in tasks(n) if not args.tasks or task.name in args.tasks]
    scores: dict[str, dict[str, float]] = {}
    began = time.perf_counter()
    for length, task in tqdm(cells, desc="full cache"):
        try:
            score = evaluate(model, tokenizer, task, args.seed, args.limit)
        except ValueError as error:  # a length that the task cannot have
            log.warning("%s at %d: %s", task.name, length, error)
            continue
        scores.setdefault(task.name, {})[str(length)] = score
    print(f"{'task':24}", *(f"{length:6}" for length in args.lengths))
    for name, row in scores.items():
        print(f"{name:24}", *(f"{row[str(n)]:6.2f}" if str(n) in row else "     -" for n in args.lengths))
    if args.out:
        found = {"seed": args.seed, "limit": args.limit, "seconds": time.perf_counter() - began, "scores": scores}
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
