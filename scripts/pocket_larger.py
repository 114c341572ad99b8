"""Train the larger pocket model in a given wall time on one GPU: `python scripts/train_pocket.py --larger --help`.

Worker processes make batches; every family of exercises climbs from short to long texts as soon as it is answered, or
when the clock says so; what is learnt gets fewer tokens. The learning rate follows the clock and ends at zero. The time
may be taken in pieces (`--piece`): each ends with a checkpoint, from which the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing as mp
import os
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pocket_families import FAMILIES, LENGTHS, Packed, make_packed
from pocket_larger_course import Larger, Standing, climb, shares_of
from pocket_larger_trainer import LargerTrainer
from transformers import LlamaForCausalLM

log = logging.getLogger("train_pocket")
AGAIN = 75  # exit code: something is left, the same command goes on
TRAVELLING = "travelling.pt"  # a checkpoint with rounded momenta
CLOSING = 30.0  # seconds of a piece that are kept for its last step, its checkpoint and the export


def _worker(config: Larger, shares: Any, counter: Any, batches: Any) -> None:  # noqa: ANN401
    """Make batches without end, each with the shares of the moment."""
    while True:
        with counter.get_lock():
            number = counter.value
            counter.value += 1
        now = np.array(shares[:]).reshape(len(FAMILIES), len(LENGTHS))
        column = now.sum(0)
        level = int(np.random.default_rng([config.seed, number, 1]).choice(len(LENGTHS), p=column / column.sum()))
        batches.put(make_packed(config.seed, number, level, now[:, level], config.tokens))


class Batches:
    """Worker processes and what they have made. They start before the GPU is touched."""

    def __init__(self, config: Larger, first: int, shares: np.ndarray) -> None:
        context = mp.get_context("fork")
        self.shares = context.Array("d", shares.reshape(-1).tolist())
        self.counter = context.Value("q", first)
        self.made: Any = context.Queue(maxsize=max(4, min(24, 2 * config.workers)))
        arguments = (config, self.shares, self.counter, self.made)
        self.processes = [context.Process(target=_worker, args=arguments, daemon=True) for _ in range(config.workers)]
        for process in self.processes:
            process.start()

    def next(self) -> Packed:
        """The next batch; RuntimeError if a worker has died."""
        while True:
            try:
                return self.made.get(timeout=30)
            except queue.Empty:
                if not all(process.is_alive() for process in self.processes):
                    raise RuntimeError("a worker that makes batches has died") from None

    def close(self) -> None:
        """End the workers."""
        for process in self.processes:
            process.terminate()


def train(trainer: LargerTrainer, batches: Batches, out: Path, until: float, every: int = 20) -> None:
    """Train until `until` seconds of training have passed, what earlier runs took counted in; a step at least."""
    at, budget = trainer.at, trainer.config.minutes * 60
    began, before, saved = time.perf_counter(), at.seconds, at.seconds
    while at.seconds < max(until, before + 1e-9):
        trainer.step(batches.next(), at.seconds / budget)
        at.seconds = before + time.perf_counter() - began
        if at.step % every:
            continue
        loss = trainer.read()
        if not np.isfinite(loss):
            log.warning("the loss is %s, back to the last checkpoint", loss)
            seconds = at.seconds
            trainer.load(out / "checkpoint.pt")
            at = trainer.at
            at.seconds = seconds
            continue
        climb(at, at.seconds / budget)
        batches.shares[:] = shares_of(at, at.seconds / budget).reshape(-1).tolist()
        _report(at, loss, out, at.step % (every * 10) == 0)
        if at.seconds - saved > 60 or saved == before:
            trainer.save(out / "checkpoint.pt")
            saved = at.seconds
    trainer.save(out / "checkpoint.pt")


def _report(at: Standing, loss: float, out: Path, spoken: bool) -> None:
    met = {family.name: [round(x, 3) for x in row] for family, row in zip(FAMILIES, at.met, strict=True)}
    line = {"step": at.step, "seconds": round(at.seconds, 1), "tokens": at.tokens, "loss": round(loss, 4), "met": met}
    with (out / "curve.jsonl").open("a") as curve:
        curve.write(json.dumps(line) + "\n")
    if spoken:
        now = "  ".join(
            f"{f.name} {LENGTHS[k]}:{at.met[i][k]:.2f}" for i, f in enumerate(FAMILIES) for k in [at.reached[i]]
        )
        log.info("%4.0f s  step %d  %.0f M tokens  loss %.3f  %s", at.seconds, at.step, at.tokens / 1e6, loss, now)


def run(args: argparse.Namespace, finish: Callable[[LlamaForCausalLM, Path], None]) -> int:
    """What `train_pocket.py --larger` does: train, export by `finish`, evaluate. Its exit code: 0, or AGAIN."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from pocket_larger_eval import Questions, evaluate  # imports nothing that the training needs

    clock = Piece(args.piece)
    if args.tokens < 1 or args.tokens % LENGTHS[-1]:
        raise SystemExit(f"--tokens {args.tokens} must be a multiple of {LENGTHS[-1]}: each length fills a step")
    config = _config(args)
    args.out.mkdir(parents=True, exist_ok=True)
    scores, checkpoint = args.out / "eval.json", args.out / "checkpoint.pt"
    if not args.resume:
        scores.unlink(missing_ok=True)
    left = config.minutes * 60 - (_seconds(checkpoint) if args.resume else 0.0)
    batches = Batches(config, int(time.time()) if args.resume else 0, shares_of(Standing(), 0.0)) if left > 0 else None
    # The questions are only for the piece that can end the training. Their pool has a thread: forked after the others.
    questions = Questions(args.eval_limit) if args.eval_limit and left <= clock.left else None
    model = _train_piece(args, config, batches, clock)
    if model is None:
        return AGAIN
    folder = args.export or args.out / "model"
    finish(model, folder)
    if args.eval_limit and questions is None:
        return AGAIN
    if questions is not None:
        seconds = args.eval_seconds if args.piece is None else clock.left
        if not evaluate(folder, questions.collect(), scores, config.device, seconds) and args.piece is not None:
            return AGAIN
    (args.out / TRAVELLING).unlink(missing_ok=True)
    return 0


@dataclass(frozen=True)
class Piece:
    """The wall time of this command, from its start. seconds: None without an end."""

    seconds: float | None
    began: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        """Seconds that may still be used."""
        return math.inf if self.seconds is None else self.seconds - CLOSING - (time.perf_counter() - self.began)


def _config(args: argparse.Namespace) -> Larger:
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    config = Larger(seed=args.seed, device=args.device, minutes=args.minutes, tokens=args.tokens, workers=workers)
    return replace(config, rate=args.rate) if args.rate else config


def _seconds(checkpoint: Path) -> float:
    """What training up to a checkpoint took."""
    return float(torch.load(checkpoint, map_location="cpu", weights_only=True)["at"]["seconds"])


def _train_piece(
    args: argparse.Namespace, config: Larger, batches: Batches | None, clock: Piece
) -> LlamaForCausalLM | None:
    """Train for this piece, or (batches: None) load what is trained; the model, None if the training is not at its end.

    It leaves a checkpoint that can travel beside the exact one: the next piece may run on another machine.
    """
    began = time.perf_counter()
    trainer = LargerTrainer(config, trains=batches is not None)
    if args.resume:
        trainer.load(args.out / "checkpoint.pt")
    else:
        trainer.at.seconds = time.perf_counter() - began  # starting up counts too
    if batches is None:
        return trainer.model
    parameters = sum(p.numel() for p in trainer.model.parameters())
    log.info("%.2f M parameters, %d workers, %s", parameters / 1e6, config.workers, config.device)
    end = config.minutes * 60
    try:
        train(trainer, batches, args.out, min(end, trainer.at.seconds + clock.left))
    finally:
        batches.close()
    trainer.save(args.out / TRAVELLING, rounded=True)
    if trainer.at.seconds >= end:
        return trainer.model
    log.info("%.0f of %.0f s of training are done: the same command with --resume goes on", trainer.at.seconds, end)
    return None
