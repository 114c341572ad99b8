"""The larger pocket model in training: weights, optimisers and standing, which are what a checkpoint holds."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pocket_data import tokenizer
from pocket_families import FAMILIES, LENGTHS, Packed
from pocket_fast import Forward, Muon, Targets, loss_of, tame
from pocket_larger_course import Larger, Standing
from pocket_tokenizer import SPECIAL
from transformers import LlamaConfig, LlamaForCausalLM

log = logging.getLogger("train_pocket")


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
