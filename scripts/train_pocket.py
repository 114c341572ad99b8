"""Train the pocket model, the small Llama that ships with kvbench: `python scripts/train_pocket.py --help`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from pocket_stages import Batch, Stage, curriculum, make_batch
from pocket_tokenizer import SPECIAL, build_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

log = logging.getLogger("train_pocket")
MOST_TARGETS = 2048  # per step


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
    mlp: int = 256
    context: int = 4352
    device: str = "cpu"
    shards: int = 2  # threads, each with its part of the batch: faster on two shared cores than parallel operations


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
        head_dim=config.hidden // config.heads,
        max_position_embeddings=config.context,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
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
    """Write weights (float32 safetensors), configs and tokenizer as `from_pretrained` reads them."""
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


def train(trainer: Trainer, out: Path, until: int, save_every: int) -> None:
    """Train up to step `until`; batches are made one ahead in another process."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    config, at = trainer.config, trainer.at
    with ProcessPoolExecutor(1) as workers, Progress(*columns) as progress:

        def order() -> Future[Batch]:
            return workers.submit(make_batch, trainer.stage, config.seed, at.step + ahead, config.tokens)

        bar = progress.add_task("train", total=until, completed=at.step)
        ahead = 0
        coming = order() if at.step < until else None
        while coming is not None:
            began = time.perf_counter()
            batch = coming.result()
            ahead = 1
            coming = order() if at.step + 1 < until else None
            trainer.step(batch)
            if trainer.advance() and coming is not None:
                ahead = 0
                coming = order()
            at.seconds += time.perf_counter() - began
            progress.update(
                bar, completed=at.step, description=f"{trainer.stage.name} {at.accuracy.get(trainer.stage.gate, 0):.3f}"
            )
            if at.step % 20 == 0:
                with (out / "curve.jsonl").open("a") as curve:
                    curve.write(json.dumps(asdict(at) | {"name": trainer.stage.name}) + "\n")
            if at.step % save_every == 0 or at.step == until:
                trainer.save(out / "checkpoint.pt")


def export_larger(model: LlamaForCausalLM, folder: Path) -> None:
    """As `export`, weights in bfloat16."""
    export(model.to(torch.bfloat16), folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=Config.steps, help="updates in all")
    parser.add_argument("--decay", type=int, default=Config.decay, help="last steps, with a falling learning rate")
    parser.add_argument("--seed", type=int, default=Config.seed)
    parser.add_argument("--device", default=Config.device, help="cpu or cuda")
    parser.add_argument("--larger", action="store_true", help="7 million parameters, trained for --minutes on a GPU")
    parser.add_argument("--minutes", type=float, default=8.3, help="of --larger: wall time from start to last update")
    parser.add_argument(
        "--piece", type=float, help="of --larger: seconds of this command; --resume goes on (exit code 75)"
    )
    parser.add_argument("--rate", type=float, help="of --larger: learning rate, by default 2e-3")
    parser.add_argument("--tokens", type=int, default=65_280, help="of --larger: tokens a step, a multiple of 4,352")
    parser.add_argument("--eval-limit", type=int, default=50, help="of --larger: examples a task and length, 0: none")
    parser.add_argument("--eval-seconds", type=float, default=55, help="of --larger, in one piece: for the evaluation")
    parser.add_argument("--out", type=Path, default=Path("results/runs/pocket"), help="checkpoint and curve")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--until", type=int, help="stop after this step, to go on later")
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--export", type=Path, help="folder for the finished model")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.larger:
        from pocket_larger import run

        logging.basicConfig(level=logging.INFO, format="%(message)s")
        sys.exit(run(args, export_larger))
    from rich.logging import RichHandler  # not wanted on the machine that trains the larger one

    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler()])
    torch.set_num_threads(1)  # the shards are the threads
    config = Config(steps=args.steps, decay=args.decay, device=args.device, seed=args.seed)
    if args.device != "cpu":
        config = replace(config, shards=1)
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config, curriculum())
    if args.resume:
        trainer.load(args.out / "checkpoint.pt")
    train(trainer, args.out, args.until or config.steps, args.save_every)
    if args.export:
        export(trainer.model, args.export)


if __name__ == "__main__":
    main()
