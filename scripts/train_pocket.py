"""Train a pocket model, the small Llama that ships with kvbench: data, curriculum and training loop in one script.

    python scripts/train_pocket.py --export my_pocket        # one to two hours on two CPU cores
    python -m kvbench model.path=my_pocket policy=full task=niah

An exercise is a list of token ids with a mask of the tokens that can be known from the text before them; only these
carry loss. Exercises depend on the seed and the step alone, so that a resumed training ends with the same weights.
The tokenizer is the one that is shipped in kvbench/pocket.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from kvbench.tasks.niah import Niah
from kvbench.tasks.ruler.niah import singular
from kvbench.tasks.ruler.templates import NEEDLE, NOISE, template
from kvbench.tasks.words import own_words, written_sentences

MOST_TARGETS = 2048  # predictable tokens per step: the output layer over the vocabulary is a third of a step's time
Exercise = tuple[list[int], list[bool]]
Maker = Callable[[Generator, int], Exercise]


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of the shipped model: one token per common word, digits in groups of three."""
    return AutoTokenizer.from_pretrained(str(files("kvbench") / "pocket"))


def encode(text: str) -> list[int]:
    """Token ids of a text, without special tokens."""
    return list(tokenizer().encode(text, add_special_tokens=False))


# --- exercises on tokens ---
class Pools(NamedTuple):
    """Token ids to draw from: words after a blank, nouns without one, filler words, groups of three digits."""

    keys: np.ndarray
    heads: np.ndarray
    tails: np.ndarray
    filler: np.ndarray
    groups: np.ndarray


@cache
def pools() -> Pools:
    """The pools, made of the word lists of kvbench's tasks."""
    words = own_words()

    def ids(texts: Sequence[str]) -> np.ndarray:
        return np.array([encode(text)[0] for text in texts])

    blank = [[f" {word}" for word in some] for some in (words.adjectives, words.nouns, words.verbs)]
    numbers = [f"{number:03d}" for number in range(1000)]
    return Pools(ids(blank[0] + blank[1]), ids(blank[0]), ids(words.nouns), ids(blank[2]), ids(numbers))


def copying(rng: Generator, length: int) -> Exercise:
    """Random tokens in which spans of 4 to 12 recur; all but the first token of a recurring span are predictable."""
    pool = np.concatenate(pools())
    ids, known = [_bos()], [False]
    while len(ids) < length:
        span = int(rng.integers(4, 13))
        if len(ids) > 24 and rng.random() < 0.6:
            start = int(rng.integers(1, len(ids) - span))
            ids += ids[start : start + span]
            known += [False] + [True] * (span - 1)
        else:
            ids += rng.choice(pool, span).tolist()
            known += [False] * span
    return ids[:length], known[:length]


def facts(rng: Generator, length: int, count: int, gap: int, value: int, paired: bool = False) -> Exercise:
    """`key link value .` hidden in filler, and all of them again at the end, where the values are predictable.

    count: facts; gap: most tokens between key and value; value: most tokens of a value; paired: keys of two words.
    """
    pool, stop, line = pools(), encode(".")[0], encode("\n")[0]
    keys = _pairs(rng, count) if paired else [[key] for key in rng.choice(pool.keys, count, False).tolist()]
    link = rng.choice([encode(text)[0] for text in (" is", ":", " ", " =", " text")], int(rng.integers(gap + 1)))
    values = [rng.choice(pool.groups, int(rng.integers(1, value + 1))).tolist() for _ in keys]
    statements = [[*key, *link.tolist(), *number, stop] for key, number in zip(keys, values, strict=True)]
    tail, known = list[int](), list[bool]()
    for index in rng.permutation(count):
        tail += [line, *statements[index]]
        known += [False] * (1 + len(keys[index]) + len(link)) + [True] * (len(values[index]) + 1)
    free = length - 1 - len(tail) - sum(map(len, statements))
    assert free >= 0, f"{count} facts do not fit into {length} tokens"
    filler = rng.choice(pool.filler, free).tolist()
    for place in sorted(rng.integers(0, free + 1, count).tolist(), reverse=True):
        filler[place:place] = statements.pop()
    return [_bos(), *filler, *tail], [False] * (1 + len(filler)) + known


def _pairs(rng: Generator, count: int) -> list[list[int]]:
    """Different `adjective-noun` keys; many share a word with others."""
    pool, hyphen, few = pools(), encode("-")[0], max(2, int(count**0.5) + 1)
    heads, tails = rng.choice(pool.heads, few), rng.choice(pool.tails, few)
    chosen: dict[tuple[int, int], None] = {}
    while len(chosen) < count:
        near = rng.random() < 0.5
        pair = rng.choice(heads if near else pool.heads), rng.choice(tails if near else pool.tails)
        chosen.setdefault((int(pair[0]), int(pair[1])))
    return [[head, hyphen, tail] for head, tail in chosen]


def _bos() -> int:
    return int(tokenizer().bos_token_id)


# --- exercises on text ---
class Frame(NamedTuple):
    """The texts around a context: before it, one needle, a question, and the beginning of an answer; and `and`."""

    head: str
    needle: str
    question: str
    prefix: str
    last: str


def frame(ruler: bool, values: int, together: int) -> Frame:
    """The prompt of RULER's needle tasks or of the task niah, for `together` keys of `values` numbers each."""
    single = values * together == 1
    if ruler:
        text, prefix = template("niah").text, template("niah").answer_prefix
        if single:
            text, prefix = singular(text), singular(prefix)
        kind = "number" if single else "numbers"
        text, prefix = (part.replace("{type_needle_v}", kind).replace("{query}", "{keys}") for part in (text, prefix))
        head, question = text.split("{context}")
        return Frame(head, NEEDLE.replace("{type_needle_v}", "numbers"), question, prefix, ", and ")
    task = Niah(values=values, keys=together, queries=together)
    slots = {"number": "number" if single else "numbers", "is_are": "is" if single else "are", "keys": "{keys}"}
    head, question = task.frame.format(context="{context}", question=task.question.format(**slots)).split("{context}")
    return Frame(head, task.needle, question, task.answer_prefix.format(**slots), " and ")


def listed(items: Sequence[str], last: str) -> str:
    """`a`, `a and b`, `a, b and c`; last: the text before the last item."""
    return ", ".join(items[:-1]) + last + items[-1] if len(items) > 1 else items[0]


def needles(rng: Generator, length: int) -> Exercise:
    """Needles in a haystack and questions about some of them; the answers are predictable.

    Drawn: the frame, the haystack (written sentences, RULER's noise, or needles only), the number of needles and
    questions, and at times several numbers of a key or several keys of a question.
    """
    ruler = rng.random() < 0.4
    haystack = ("story", "noise", "needle")[int(rng.choice(3, p=[0.15, 0.35, 0.5] if ruler else [0.5, 0.25, 0.25]))]
    several = int(rng.integers(2, 5)) if length >= 256 else 1
    values, together = [(several, 1), (1, several), (1, 1)][int(rng.choice(3, p=[0.12, 0.12, 0.76]))]
    texts = frame(ruler, values, together)
    line = len(encode(texts.needle.format(key="able-acorn", value="5285656") + "\n"))
    asking = len(encode(texts.question + texts.prefix)) + together * (10 + values * 6)
    asked = max(1, int(rng.integers(1, max(2, length // (3 * asking)))))
    free = length - len(encode(texts.head)) - asked * asking - 1
    most = max(asked * together, free // (line * values + 1))
    few = max(asked * together, int(rng.integers(1, max(2, length // 64))) // values)
    count = most if haystack == "needle" else min(few, most)
    keys = _keys(rng, count)
    numbers = {key: [str(rng.integers(10**6, 10**7)) for _ in range(values)] for key in keys}
    lines = [texts.needle.format(key=key, value=number) for key in keys for number in numbers[key]]
    lines = [lines[index] for index in rng.permutation(len(lines))]
    context = _hidden(rng, lines, haystack, free - len(lines) * line)
    ids, known = [_bos(), *encode(texts.head + context)], []
    known = [False] * len(ids)
    for start in range(0, asked * together, together):
        names = keys[start : start + together]
        before, after = texts.prefix.split("{keys}")
        answer = listed([number for key in names for number in numbers[key]], texts.last)
        parts = [
            (texts.question.replace("{keys}", listed(names, texts.last)) + before.removesuffix(" "), False),
            (f" {listed(names, texts.last)}", True),
            (after, False),
            (f" {answer}", True),
        ]
        for text, predictable in parts:
            ids += encode(text)
            known += [predictable] * (len(ids) - len(known))
        ids.append(int(tokenizer().eos_token_id))
        known.append(True)
    return ids, known


def _keys(rng: Generator, count: int) -> list[str]:
    """Different `adjective-noun` keys in random order; many share a word with others."""
    words, few = own_words(), max(2, int(count**0.5) + 1)
    near = [[some[i] for i in rng.choice(len(some), few)] for some in (words.adjectives, words.nouns)]
    chosen: dict[str, None] = {}
    while len(chosen) < count:
        pools_ = [
            n if rng.random() < 0.3 else list(a) for n, a in zip(near, (words.adjectives, words.nouns), strict=True)
        ]
        chosen.setdefault("-".join(pool[int(rng.integers(len(pool)))] for pool in pools_))
    return [list(chosen)[index] for index in rng.permutation(count)]


def _hidden(rng: Generator, lines: list[str], haystack: str, free: int) -> str:
    """The lines at random places in filler of at most `free` tokens."""
    if haystack == "needle":
        return "\n".join(lines)
    stream, filler = written_sentences(random.Random(int(rng.integers(2**31)))), list[str]()
    while free > 0:
        filler.append(NOISE if haystack == "noise" else next(stream).rstrip())
        free -= len(encode(" " + filler[-1]))
    filler = filler[:-1]
    for place in sorted(rng.integers(0, len(filler) + 1, len(lines)).tolist(), reverse=True):
        filler.insert(place, lines.pop())
    return ("\n" if haystack == "noise" else " ").join(filler)


# --- the curriculum ---
@dataclass(frozen=True)
class Level:
    """Exercises of one length, mixed with easier ones. The next level begins when `target` of its tokens are right."""

    name: str
    make: Maker
    length: int
    target: float = 0.95


LEVELS = (
    Level("copy", copying, 64, 0.8),
    Level("facts", partial(facts, count=3, gap=1, value=2), 64),
    Level("facts", partial(facts, count=6, gap=2, value=2), 128),
    Level("facts", partial(facts, count=8, gap=3, value=3), 256),
    Level("pairs", partial(facts, count=8, gap=3, value=3, paired=True), 256),
    *(Level("needles", needles, length, 0.93) for length in (256, 512, 1024, 2048, 4288)),
)
EASIER = 0.3  # share of the steps with an exercise of an earlier level


def make_batch(level: int, seed: int, step: int, tokens: int) -> tuple[Tensor, Tensor, bool]:
    """About `tokens` tokens of one exercise: ids [B,T], predictable [B,T], and whether it is of the level itself."""
    rng = np.random.default_rng([seed, step])
    chosen = LEVELS[int(rng.integers(level))] if level and rng.random() < EASIER else LEVELS[level]
    rows = [chosen.make(rng, chosen.length) for _ in range(max(1, round(tokens / chosen.length)))]
    width = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), width), int(tokenizer().pad_token_id))
    known = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (row_ids, row_known) in enumerate(rows):
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        known[row, : len(row_known)] = torch.tensor(row_known)
    return ids, known, chosen is LEVELS[level]


# --- training ---
@dataclass(frozen=True)
class Config:
    """Everything that determines the weights, except the code. decay: final steps, in which the rate falls to 0."""

    seed: int = 20
    steps: int = 4300
    tokens: int = 8192  # per step
    learning_rate: float = 3e-3
    warmup: int = 100
    decay: int = 850
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    device: str = "cpu"


@dataclass
class Progress:
    """The progress of the training. accuracy: running share of right tokens in the exercises of the level."""

    step: int = 0
    level: int = 0
    accuracy: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """Model, optimizer and progress: the contents of a checkpoint."""

    def __init__(self, config: Config) -> None:
        torch.manual_seed(config.seed)
        llama = LlamaConfig(
            vocab_size=len(tokenizer()), hidden_size=config.hidden, intermediate_size=2 * config.hidden,
            num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
            head_dim=config.hidden // config.heads, max_position_embeddings=4352, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e5}, pad_token_id=tokenizer().pad_token_id,
            bos_token_id=tokenizer().bos_token_id, eos_token_id=tokenizer().eos_token_id,
        )  # fmt: skip
        self.config, self.progress = config, Progress()
        self.model = LlamaForCausalLM(llama).to(config.device)  # type: ignore[arg-type]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)

    def rate(self) -> float:
        """Linear warm-up, constant, linear decay over the last `decay` steps."""
        c, step = self.config, self.progress.step
        return c.learning_rate * min(1.0, (step + 1) / c.warmup, (c.steps - step) / max(1, c.decay))

    def step(self) -> float:
        """One update; returns the share of predictable tokens that were right."""
        at = self.progress
        ids, known, own = make_batch(at.level, self.config.seed, at.step, self.config.tokens)
        ids, known = ids.to(self.config.device), known[:, 1:].to(self.config.device)
        places = known.nonzero()
        rows, columns = places[:: 1 + len(places) // MOST_TARGETS].T
        with torch.autocast(ids.device.type, torch.bfloat16):
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden[rows, columns])
        target = ids[rows, columns + 1]
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        F.cross_entropy(logits.float(), target).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        accuracy = float((logits.argmax(-1) == target).float().mean())
        at.step += 1
        at.accuracy += 0.1 * (accuracy - at.accuracy) * own
        if at.accuracy >= LEVELS[at.level].target and at.level + 1 < len(LEVELS):
            at.level, at.accuracy = at.level + 1, 0.0
        return accuracy

    def train(self, checkpoint: Path, until: int, save_every: int = 100) -> None:
        """Train up to step `until`, with a checkpoint every `save_every` steps."""
        with tqdm(total=until, initial=self.progress.step) as bar:
            while self.progress.step < until:
                self.step()
                at = self.progress
                bar.set_description(f"{LEVELS[at.level].name}-{LEVELS[at.level].length} {at.accuracy:.3f}", False)
                bar.update()
                if at.step % 20 == 0:
                    at.history.append({"step": at.step, "level": at.level, "accuracy": at.accuracy})
                if at.step % save_every == 0 or at.step == until:
                    self.save(checkpoint)

    def save(self, path: Path) -> None:
        """Write a checkpoint; a run that is killed leaves the previous one."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "progress": asdict(self.progress)}, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint."""
        state = torch.load(path, map_location=self.config.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Config.steps, help="updates in all")
    parser.add_argument("--decay", type=int, default=Config.decay, help="last steps, with a falling learning rate")
    parser.add_argument("--seed", type=int, default=Config.seed)
    parser.add_argument("--device", default=Config.device, help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=Path("results/runs/pocket"), help="folder of the checkpoint")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument("--export", type=Path, help="folder for the finished model and its tokenizer")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(Config(seed=args.seed, steps=args.steps, decay=args.decay, device=args.device))
    if args.resume:
        trainer.load(args.out / "checkpoint.pt")
    trainer.train(args.out / "checkpoint.pt", args.steps)
    (args.out / "curve.json").write_text(json.dumps(trainer.progress.history), encoding="utf-8")
    if args.export:
        trainer.model.save_pretrained(args.export)
        tokenizer().save_pretrained(args.export)
    return 0


if __name__ == "__main__":
    sys.exit(main())
