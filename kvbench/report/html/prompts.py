"""Builds the prompts of a run again from its configuration, and checks them against the hashes in its samples.

Samples contain only a hash of their prompt, because prompts are long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import accumulate
from pathlib import Path

import torch
import yaml
from huggingface_hub import snapshot_download
from transformers import AutoConfig, PreTrainedTokenizerBase

from kvbench.config.parts import build
from kvbench.errors import UsageError, first_line
from kvbench.models.files import ModelSpec, gguf_file
from kvbench.models.gguf import described
from kvbench.models.loading import Checkpoint
from kvbench.models.prompts import PromptMaker
from kvbench.results.files import read_yaml
from kvbench.results.labels import compressed
from kvbench.results.result import Result
from kvbench.results.samples import Sample
from kvbench.tasks.task import PlainTokenizer, Task
from kvbench.tasks.trust import check_parts, reading

HEAD, TAIL, AROUND, FOUND = 60, 140, 24, 3  # tokens shown at both ends and around a reference; number of references


@dataclass(frozen=True)
class Passage:
    """Consecutive tokens of a prompt. start: position of the first. skipped: tokens left out before it."""

    start: int
    tokens: tuple[str, ...]
    skipped: int


@dataclass(frozen=True)
class ShownPrompts:
    """Passages by prompt hash. reason: why there are none."""

    shown: Mapping[str, tuple[Passage, ...]]
    reason: str = ""


def prompts_of(run: Result, count: int) -> ShownPrompts:
    """The prompts of the first `count` examples of a run: both ends, and the text around the references."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the run has already logged its warnings
    try:
        with reading():
            return ShownPrompts(dict(_made(run, count)))
    except (UsageError, ValueError, TypeError, KeyError, ImportError, OSError, yaml.YAMLError) as error:
        return ShownPrompts({}, f"Prompts are not shown, because they cannot be built again: {first_line(error)}.")
    finally:
        logging.disable(level)


def _made(run: Result, count: int) -> Iterator[tuple[str, tuple[Passage, ...]]]:
    config = read_yaml(run.folder / "config.yaml")["config"]
    check_parts(config["task"], path="task")
    task = build(config["task"])
    if not isinstance(task, Task):
        raise ValueError(f"{type(task).__name__} is not a task")
    checkpoint = _checkpoint(run, ModelSpec(name=run.model, **config["model"]))
    tokenizer = checkpoint.tokenizer()
    limits = checkpoint.max_positions, checkpoint.spec.max_prompt_tokens
    system = checkpoint.spec.system_prompt
    maker = PromptMaker(tokenizer, task, *limits, compressed(run.identity), system_prompt=system)
    examples = task.examples(PlainTokenizer(tokenizer), config["seed"], config["limit"])
    text_of = _texts(tokenizer)
    first = [sample for sample in run.samples[:count] if not sample.sample]  # the first answer to each prompt
    for sample, example in zip(first, examples, strict=False):
        prompt = maker.make(example)
        if prompt.hash != sample.prompt_hash:
            raise ValueError(f"example {sample.index} has changed (different data or code of the task)")
        yield prompt.hash, passages([text_of(i) for i in prompt.ids.tolist()], sample)


def _checkpoint(run: Result, spec: ModelSpec) -> Checkpoint:
    """Configuration and tokenizer of the model from local files, without weights and without remote code."""
    file = gguf_file(spec)
    if file is not None:
        folder = described(file)
    elif spec.bundled is not None:
        folder = Path(str(resources.files("kvbench") / spec.bundled))
    elif spec.path is not None:
        folder = Path(spec.path).expanduser()
    elif "object" in run.identity["model"]:
        raise ValueError("the model was an object in Python")
    else:
        commit = run.identity["model"].get("commit")
        folder = Path(snapshot_download(str(spec.hub_id), revision=commit, local_files_only=True))
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return Checkpoint(replace(spec, trust_remote_code=False), folder, config, torch.float32, ())


def _texts(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], str]:
    """Decodes a token behind another one, because a single SentencePiece token would lose its leading space."""
    before = tokenizer.encode("a", add_special_tokens=False)[-1:]
    skip = len(str(tokenizer.decode(before)))

    @cache
    def text(token: int) -> str:
        return str(tokenizer.decode([*before, token]))[skip:]

    return text


def passages(tokens: list[str], sample: Sample) -> tuple[Passage, ...]:
    """The first and last tokens of a prompt, and those around its references."""
    length = len(tokens)
    shown = {*range(min(HEAD, length)), *range(max(0, length - TAIL), length)}
    text, ends, found = "".join(tokens), [*accumulate(map(len, tokens))], 0
    for reference in dict.fromkeys(reference for reference in sample.references if reference.strip()):
        place = text.find(reference)
        if place >= 0 and found < FOUND:
            found += 1
            first = next(i for i, end in enumerate(ends) if end > place)
            last = next(i for i, end in enumerate(ends) if end >= place + len(reference))
            shown |= {*range(max(0, first - AROUND), min(length, last + 1 + AROUND))}
    starts = [i for i in sorted(shown) if i - 1 not in shown]
    stops = [i + 1 for i in sorted(shown) if i + 1 not in shown]
    before = [0, *stops]
    return tuple(Passage(a, tuple(tokens[a:b]), a - last) for a, b, last in zip(starts, stops, before, strict=False))
