"""Prompts as they were asked: made again from a run's configuration, and held against the hashes its samples have.

Samples say what was asked by a hash alone: a prompt of 100,000 tokens in every line would be most of a run's bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path

import torch
import yaml
from huggingface_hub import snapshot_download
from transformers import AutoConfig, PreTrainedTokenizerBase

from kvbench.analysis.result import Result
from kvbench.config.tree import build
from kvbench.identity.labels import compressed
from kvbench.models.loading import Checkpoint, ModelSpec
from kvbench.models.prompts import PromptMaker
from kvbench.records.files import read_yaml
from kvbench.records.sample import Sample
from kvbench.tasks.task import PlainTokenizer, Task
from kvbench.terminal.errors import UsageError

HEAD, TAIL, AROUND, PASSAGES = 60, 140, 24, 3  # tokens shown of a prompt, and around a reference; how many of those


@dataclass(frozen=True)
class Passage:
    """Tokens of a prompt that stand together, each as its text.

    start: the place of the first in the prompt. folded: shown only when the whole prompt is asked for.
    """

    start: int
    tokens: tuple[str, ...]
    folded: bool


@dataclass(frozen=True)
class Shown:
    """A prompt from first to last token: its ends, passages that hold a reference, and between them folded ones."""

    passages: tuple[Passage, ...]


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run's first examples by their hash; reason: why there are none, in words."""

    shown: Mapping[str, Shown]
    reason: str = ""


def prompts_of(run: Result, count: int) -> Prompts:
    """The prompts of the first `count` examples of a run, from its own configuration."""
    try:
        with _quietly():
            return Prompts(dict(_made(run, count)))
    except (UsageError, ValueError, TypeError, KeyError, ImportError, OSError, yaml.YAMLError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        return Prompts({}, f"prompts are not shown, they cannot be made again here: {first}")


def _made(run: Result, count: int) -> Iterator[tuple[str, Shown]]:
    config = read_yaml(run.folder / "config.yaml")["config"]
    task = build(config["task"])
    if not isinstance(task, Task):
        raise ValueError(f"{type(task).__name__} is no task")
    checkpoint = _checkpoint(run, ModelSpec(name=run.model, **config["model"]))
    tokenizer = checkpoint.tokenizer()
    limits = checkpoint.max_positions, checkpoint.spec.max_prompt_tokens
    maker = PromptMaker(tokenizer, task, *limits, compressed(run.identity))
    examples = task.examples(PlainTokenizer(tokenizer), config["seed"], config["limit"])
    text_of = _texts(tokenizer)
    asked = [sample for sample in run.samples[:count] if not sample.sample]  # one for all answers to a prompt
    for sample, example in zip(asked, examples, strict=False):
        prompt = maker.make(example)
        if prompt.hash != sample.prompt_hash:
            raise ValueError(f"example {sample.index} is another one now (the task's data or code changed since)")
        yield prompt.hash, _shown([text_of(i) for i in prompt.ids.tolist()], sample)


def _checkpoint(run: Result, spec: ModelSpec) -> Checkpoint:
    """Configuration and tokenizer of a run's model as this machine has them: no weights, no code of the model's own."""
    if spec.bundled is not None:
        folder = Path(str(resources.files("kvbench") / spec.bundled))
    elif spec.path is not None:
        folder = Path(spec.path).expanduser()
    elif "object" in run.identity["model"]:
        raise ValueError("the model was an object of a program")
    else:
        commit = run.identity["model"].get("commit")
        folder = Path(snapshot_download(str(spec.hub_id), revision=commit, local_files_only=True))
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return Checkpoint(replace(spec, trust_remote_code=False), folder, config, torch.float32, ())


def _texts(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], str]:
    """The text of a token as it follows another one: by itself a SentencePiece token loses the space before it."""
    before = tokenizer.encode("a", add_special_tokens=False)[-1:]
    skip = len(str(tokenizer.decode(before)))

    @cache
    def text(token: int) -> str:
        return str(tokenizer.decode([*before, token]))[skip:]

    return text


def _shown(tokens: list[str], sample: Sample) -> Shown:
    """A prompt of which both ends and what stands around the first references are not folded."""
    length = len(tokens)
    spans = [(0, HEAD), *_around(tokens, sample.references), (length - TAIL, length)]
    merged: list[tuple[int, int]] = []
    for start, end in sorted((max(0, start), min(length, end)) for start, end in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    edges = sorted({0, *(edge for span in merged for edge in span)})
    return Shown(tuple(Passage(a, tuple(tokens[a:b]), (a, b) not in merged) for a, b in pairwise(edges)))


def _around(tokens: list[str], references: list[str]) -> Iterator[tuple[int, int]]:
    """Spans of tokens around the references that the text holds, the first few."""
    text, ends, found = "".join(tokens), _ends(tokens), 0
    for reference in dict.fromkeys(reference for reference in references if reference.strip()):
        place = text.find(reference)
        if place >= 0 and found < PASSAGES:
            found += 1
            first = next(i for i, end in enumerate(ends) if end > place)
            last = next(i for i, end in enumerate(ends) if end >= place + len(reference))
            yield first - AROUND, last + 1 + AROUND


def _ends(tokens: list[str]) -> list[int]:
    """Where each token ends in the text."""
    place, ends = 0, []
    for token in tokens:
        place += len(token)
        ends.append(place)
    return ends


@contextmanager
def _quietly() -> Iterator[None]:
    """No warnings: the run gave them."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
