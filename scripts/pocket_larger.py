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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pocket_data import tokenizer
from pocket_families import FAMILIES, LENGTHS, Packed, make_packed
from pocket_fast import Forward, Muon, Targets, loss_of, tame
from pocket_tokenizer import SPECIAL
from transformers import LlamaConfig, LlamaForCausalLM

log = logging.getLogger("train_pocket")
LEARNT = 0.92  # running share of the answers' tokens met, at which a family goes on to the next length
AGAIN = 75  # exit code: something is left, the same command goes on
TRAVELLING = "travelling.pt"  # a checkpoint with rounded momenta
CLOSING = 30.0  # seconds of a piece that are kept for its last step, its checkpoint and the export
FORCED = (0.0, 0.12, 0.22, 0.34, 0.46)  # share of the time at which every family has reached a length


@dataclass(frozen=True)
class Larger:
    """What decides the weights, apart from the code and the speed of the machine."""

    seed: int = 21
    minutes: float = 8.3
    tokens: int = 65_280  # per step, a multiple of every length
    rate: float = 2e-3
    warmup: int = 150
    decay: float = 0.3  # last share of the time, in which the learning rate falls to zero
    hidden: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 2
    head: int = 64
    mlp: int = 512
    context: int = 4352
    theta: float = 5e5
    device: str = "cuda"
    workers: int = 14


@dataclass
class Standing:
    """Where the training stands."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    reached: list[int] = field(default_factory=lambda: [0] * len(FAMILIES))
    since: list[int] = field(default_factory=lambda: [0] * len(FAMILIES))  # readings at the length reached
    met: list[list[float]] = field(default_factory=lambda: [[0.0] * len(LENGTHS) for _ in FAMILIES])


def build(config: Larger) -> LlamaForCausalLM:
    """A Llama with grouped-query attention and tied embeddings, weights drawn from the seed."""
    torch.manual_seed(config.seed)
    llama = LlamaConfig(
        vocab_size=tokenizer().get_vocab_size(),
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


def rate_at(config: Larger, step: int, share: float) -> float:
    """Linear warm-up by steps, constant, then linear to zero over the last `decay` of the time. share: of the time."""
    return config.rate * min(1.0, (step + 1) / config.warmup) * max(0.0, min(1.0, (1 - share) / config.decay))


def shares_of(at: Standing, share: float) -> np.ndarray:
    """How many of the tokens go to each family at each length, [families, lengths], not normalised.

    A family practises most at the shortest length that it has not learnt; what it has learnt keeps a quarter.
    """
    shares = np.zeros((len(FAMILIES), len(LENGTHS)))
    for row, family in enumerate(FAMILIES):
        reached, met = at.reached[row], at.met[row]
        focus = next((level for level in range(reached) if met[level] < LEARNT), reached)
        for level in range(reached + 1):
            need = 0.25 + min(1.0, 8 * (1 - met[level]))
            shares[row, level] = family.share * need * 0.6 ** abs(focus - level)
    copying = next(row for row, family in enumerate(FAMILIES) if family.name == "copy")
    shares[copying] *= 10.0 if at.met[copying][0] < 0.8 and share < 0.2 else 0.15 if share > 0.2 else 1.0
    return shares


def climb(at: Standing, share: float) -> None:
    """Let families that answer well, or whose time has come, go on to longer texts."""
    due = max(level for level, begins in enumerate(FORCED) if share >= begins)
    for row in range(len(FAMILIES)):
        level = at.reached[row]
        learnt = at.met[row][level] >= LEARNT and at.since[row] >= 3
        if level < len(LENGTHS) - 1 and (learnt or level < due):
            log.info("%4.0f s  %s reaches %d", at.seconds, FAMILIES[row].name, LENGTHS[level + 1])
            at.reached[row], at.since[row] = level + 1, 0
            at.met[row][level + 1] = max(at.met[row][level + 1], at.met[row][level] * 0.8)


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


class LargerTrainer:
    """Model, optimisers and standing, which together are what a checkpoint holds."""

    def __init__(self, config: Larger, trains: bool = True) -> None:
        """trains: False only to load what is trained, without compiling."""
        self.config = config
        self.cuda = config.device != "cpu"
        self.model = build(config)
        self.matrices = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
        matrices = {id(p) for p in self.matrices}
        self.others = [p for p in self.model.parameters() if id(p) not in matrices]
        self.muon = Muon(list(self.matrices))
        self.adam = torch.optim.AdamW(
            self.others, lr=config.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True if self.cuda else None
        )
        self.forward = self._forward() if trains else Forward(self.model, torch.float32, compiled=False)
        self.at = Standing()
        self.sums = torch.zeros(len(FAMILIES) + 1, len(LENGTHS), 2, device=config.device)
        self.losses = torch.zeros(2, device=config.device)

    def _forward(self) -> Forward:
        """The compiled forward pass if it runs at every length here, otherwise the plain one."""
        if not self.cuda:
            return Forward(self.model, torch.float32, compiled=False)
        began = time.perf_counter()
        try:
            forward = Forward(self.model, torch.bfloat16, compiled=True)
            self._try(forward)
        except Exception as error:
            log.warning("torch.compile does not run here, training goes on without it: %s", error)
            forward = Forward(self.model, torch.bfloat16, compiled=False)
            self._try(forward)
        log.info("forward and backward pass ready after %.0f s", time.perf_counter() - began)
        return forward

    def _try(self, forward: Forward) -> None:
        for length in LENGTHS:
            ids = torch.randint(3, 5000, (self.config.tokens // length, length), device=self.config.device)
            forward(ids).square().mean().backward()
            self.model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()

    def on_device(self, batch: Packed) -> tuple[torch.Tensor, Targets]:
        """The batch as tensors."""

        def moved(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
            tensor = torch.from_numpy(array.astype(np.int32) if array.dtype != np.float32 else array)
            return (tensor.pin_memory() if self.cuda else tensor).to(self.config.device, dtype, non_blocking=True)

        long, real = torch.long, torch.float32
        return moved(batch.ids, long), Targets(
            moved(batch.place, long),
            moved(batch.target, long),
            moved(batch.weight, real),
            moved(batch.family, long),
            moved(batch.option_of, long),
            moved(batch.option, long),
        )

    def step(self, batch: Packed, share: float) -> None:
        """One update. Sums what was met per family, without waiting for the device."""
        ids, targets = self.on_device(batch)
        loss, met = loss_of(self._hidden(ids), self.model.lm_head.weight, targets)
        loss.backward()
        tame([*self.matrices, *self.others])
        rate = rate_at(self.config, self.at.step, share)
        self.muon.step(rate)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        column = self.sums[:, batch.level]
        column.index_add_(0, targets.family, torch.stack((met, torch.ones_like(met)), 1))
        self.losses += torch.stack((loss.detach(), torch.ones_like(loss.detach())))
        self.at.step += 1
        self.at.tokens += batch.ids.size

    def _hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return self.forward(ids).to(self.forward.dtype)

    def read(self) -> float:
        """Bring the running shares up to date from the sums; the mean loss since the last reading."""
        sums, (total, count) = self.sums.tolist(), self.losses.tolist()
        for row, per_length in enumerate(sums[: len(FAMILIES)]):
            for level, (met, asked) in enumerate(per_length):
                if asked:
                    before = self.at.met[row][level]
                    self.at.met[row][level] = before + 0.25 * (met / asked - before)
                    self.at.since[row] += level == self.at.reached[row]
        self.sums.zero_()
        self.losses.zero_()
        return total / max(1, count)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "model": self.model.state_dict(),
            "adam": self.adam.state_dict(),
            "muon": self.muon.buffers,
            "at": asdict(self.at),
        }

    def save(self, path: Path, rounded: bool = False) -> None:
        """Write atomically: a killed run leaves the previous checkpoint.

        rounded: momenta in bfloat16, three quarters of the bytes: for machines to which little can be sent.
        """
        state = self.state()
        if rounded:
            moments = {place: _rounded(of) for place, of in state["adam"]["state"].items()}
            state |= {"muon": [buffer.bfloat16() for buffer in state["muon"]]}
            state |= {"adam": {**state["adam"], "state": moments}}
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path, map_location=self.config.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.adam.load_state_dict(state["adam"])
        for buffer, saved in zip(self.muon.buffers, state["muon"], strict=True):
            buffer.copy_(saved)
        self.at = Standing(**state["at"])


def _rounded(moments: dict[str, Any]) -> dict[str, Any]:
    return {name: x.bfloat16() if name.startswith("exp_avg") else x for name, x in moments.items()}


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
