"""Train the pocket model, the small Llama that ships with kvbench, or a larger one: `python scripts/train_pocket.py`.

A training may be taken in pieces (`--piece SECONDS`): each ends with a checkpoint, from which the same command goes on
with `--resume`. Exit code 75: the training is not at its end.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import time
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from pocket_stages import Batch, Stage, curriculum, make_batch
from pocket_tokenizer import SPECIAL, build_tokenizer
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

log = logging.getLogger("train_pocket")
MOST_TARGETS = 2048  # per step
AGAIN = 75  # exit code: something is left, the same command goes on with --resume


@dataclass(frozen=True)
class Config:
    """What decides the weights, apart from the code."""

    seed: int = 20
    steps: int = 4300
    tokens: int = 8192  # per step
    learning_rate: float = 3e-3
    warmup: int = 100
    decay: int = 850  # last steps, in which the learning rate falls to zero
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head: int = 32
    mlp: int = 256
    context: int = 4352
    theta: float = 1e5
    device: str = "cpu"
    shards: int = 2  # threads, each with its part of the batch: faster on two shared cores than parallel operations
    ahead: int = 1  # batches in the making, each in a process of its own


def larger(config: Config, processes: int) -> Config:
    """7 million parameters, for a GPU beside so many processes that make batches."""
    sizes = {"hidden": 256, "layers": 8, "heads": 8, "head": 64, "mlp": 512, "theta": 5e5}
    return replace(config, tokens=65_280, learning_rate=2e-3, ahead=max(1, min(14, processes)), **sizes)


@dataclass
class Progression:
    """Where the training stands."""

    step: int = 0
    stage: int = 0
    stage_began: int = 0
    tokens: int = 0
    seconds: float = 0.0
    accuracy: dict[str, float] = field(default_factory=dict)  # running, per part of the stage


def build_model(config: Config, vocabulary: int) -> LlamaForCausalLM:
    """A Llama with grouped-query attention and tied embeddings, weights drawn from the seed."""
    torch.manual_seed(config.seed)
    llama = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=config.hidden,
        intermediate_size=config.mlp,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head,
        max_position_embeddings=config.context,
        rope_parameters={"rope_type": "default", "rope_theta": config.theta},
        tie_word_embeddings=True,
        pad_token_id=SPECIAL.index("<pad>"),
        bos_token_id=SPECIAL.index("<bos>"),
        eos_token_id=SPECIAL.index("<eos>"),
    )
    return LlamaForCausalLM(llama).to(config.device)  # type: ignore[arg-type]


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up, constant, linear decay over the last `decay` steps."""
    left = max(0.0, min(1.0, (config.steps - step) / max(1, config.decay)))
    return config.learning_rate * min(1.0, (step + 1) / config.warmup) * left


def gradients(model: LlamaForCausalLM, batch: Batch, device: str, total: int) -> tuple[list[torch.Tensor], int]:
    """Gradients of the cross-entropy over `total` predictable tokens, as far as this batch holds them; tokens right.

    The head is applied at their positions alone.
    """
    ids = torch.from_numpy(batch.ids).to(device)
    known = torch.from_numpy(batch.known[:, 1:]).to(device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden[known])
    target = ids[:, 1:][known]
    loss = F.cross_entropy(logits.float(), target, reduction="sum") / total
    right = int((logits.argmax(-1) == target).sum())
    return list(torch.autograd.grad(loss, list(model.parameters()))), right


def shards_of(batch: Batch, count: int) -> list[Batch]:
    """The batch cut into `count` batches of whole rows."""
    known = _thin(batch.known, MOST_TARGETS)
    return [
        Batch(batch.part, ids, marks)
        for ids, marks in zip(np.array_split(batch.ids, count), np.array_split(known, count), strict=True)
        if len(ids)
    ]


def _thin(known: np.ndarray, most: int) -> np.ndarray:
    """Evenly drop predictable tokens above `most`: the head over the whole vocabulary is a third of a step's time."""
    places = np.flatnonzero(known)
    if len(places) <= most:
        return known
    kept = np.zeros(known.size, dtype=bool)
    kept[places[np.linspace(0, len(places) - 1, most).astype(int)]] = True
    return kept.reshape(known.shape)


class Trainer:
    """Model, optimiser and progression, which together are what a checkpoint holds."""

    def __init__(self, config: Config, stages: tuple[Stage, ...]) -> None:
        self.config = config
        self.stages = stages
        self.model = build_model(config, build_tokenizer().get_vocab_size())
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
        )
        self.at = Progression()
        self.pool = ThreadPoolExecutor(config.shards, initializer=torch.set_num_threads, initargs=(1,))

    def save(self, path: Path) -> None:
        """Write atomically: a killed run leaves the previous checkpoint."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "at": asdict(self.at)}
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.config.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.at = Progression(**state["at"])

    @property
    def stage(self) -> Stage:
        return self.stages[min(self.at.stage, len(self.stages) - 1)]

    def step(self, batch: Batch) -> float:
        """One update; returns the accuracy on the predictable tokens."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.at.step)
        shards = shards_of(batch, self.config.shards)
        total = sum(int(shard.known[:, 1:].sum()) for shard in shards)
        results = list(self.pool.map(lambda shard: gradients(self.model, shard, self.config.device, total), shards))
        for parameter, *parts in zip(self.model.parameters(), *(grads for grads, _ in results), strict=True):
            parameter.grad = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
        accuracy = sum(right for _, right in results) / total
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.at.step += 1
        self.at.tokens += batch.ids.size
        before = self.at.accuracy.get(batch.part, 0.0)
        self.at.accuracy[batch.part] = before + 0.1 * (accuracy - before)
        return accuracy

    def advance(self) -> bool:
        """Enter the next stage if this one's gate is passed."""
        stage, at = self.stage, self.at
        last = at.stage >= len(self.stages) - 1
        early = at.step - at.stage_began < stage.at_least
        if last or early or at.accuracy.get(stage.gate, 0.0) < stage.target:
            return False
        log.info("%s passed: %s", stage.name, at)
        at.stage += 1
        at.stage_began = at.step
        return True


def export(model: LlamaForCausalLM, folder: Path) -> None:
    """Write weights (safetensors), configs and tokenizer as `from_pretrained` reads them."""
    pad, bos, eos = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(),
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        model_max_length=model.config.max_position_embeddings,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(trainer: Trainer, out: Path, until: int, save_every: int, seconds: float = math.inf) -> None:
    """Train up to step `until`, or for so many seconds; batches are made ahead in other processes."""
    config, at, ends = trainer.config, trainer.at, time.perf_counter() + seconds
    coming: deque[Future[Batch]] = deque()
    with ProcessPoolExecutor(config.ahead) as workers, tqdm(total=until, initial=at.step) as bar:

        def order(step: int) -> Future[Batch]:
            return workers.submit(make_batch, trainer.stage, config.seed, step, config.tokens)

        while at.step < until and time.perf_counter() < ends:
            began = time.perf_counter()
            batch = (coming.popleft() if coming else order(at.step)).result()
            first = at.step + 1
            coming.extend(order(step) for step in range(first + len(coming), min(until, first + config.ahead)))
            trainer.step(batch)
            if trainer.advance():
                coming.clear()  # they are of the stage before
            at.seconds += time.perf_counter() - began
            bar.set_description(f"{trainer.stage.name} {at.accuracy.get(trainer.stage.gate, 0):.3f}", refresh=False)
            bar.update()
            if at.step % 20 == 0:
                with (out / "curve.jsonl").open("a") as curve:
                    curve.write(json.dumps(asdict(at) | {"name": trainer.stage.name}) + "\n")
            if at.step % save_every == 0:
                trainer.save(out / "checkpoint.pt")
    trainer.save(out / "checkpoint.pt")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=Config.steps, help="updates in all")
    parser.add_argument("--decay", type=int, default=Config.decay, help="last steps, with a falling learning rate")
    parser.add_argument("--seed", type=int, default=Config.seed)
    parser.add_argument("--device", default=Config.device, help="cpu or cuda")
    parser.add_argument("--larger", action="store_true", help="7 million parameters, for a GPU")
    parser.add_argument("--rate", type=float, help="learning rate")
    parser.add_argument("--tokens", type=int, help="tokens a step")
    parser.add_argument("--piece", type=float, default=math.inf, help="seconds of this command")
    parser.add_argument("--out", type=Path, default=Path("results/runs/pocket"), help="checkpoint and curve")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--until", type=int, help="stop after this step, to go on later")
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--export", type=Path, help="folder for the finished model")
    return parser.parse_args()


def main() -> int:
    args = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = Config(steps=args.steps, decay=args.decay, device=args.device, seed=args.seed)
    if args.larger:
        config = larger(config, (os.cpu_count() or 1) - 2)
    asked = {"tokens": args.tokens, "learning_rate": args.rate, "shards": None if args.device == "cpu" else 1}
    config = replace(config, **{name: value for name, value in asked.items() if value is not None})
    torch.set_num_threads(1)  # the shards are the threads
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config, curriculum())
    if args.resume:
        trainer.load(args.out / "checkpoint.pt")
    train(trainer, args.out, args.until or config.steps, args.save_every, args.piece)
    if trainer.at.step < config.steps:
        return AGAIN
    if args.export:
        export(trainer.model, args.export)
    return 0


if __name__ == "__main__":
    sys.exit(main())
