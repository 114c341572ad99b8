"""What quantised stores lose of keys, values and attention, layer by layer, on prompts of the task niah.

Every error is an L1 distance over the L1 norm of the exact tensor. Attention: outputs of the prompt's last queries.
The second picture is OTT's figure 1(c): the attention error when the tokens of the smallest keys, of the largest, or
random ones stay exact, against their number per KV head.

    python scripts/reconstruction_error.py kvbench/pocket -o results/pocket/reconstruction
"""

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.attention import prepare
from kvbench.kernels.attention_rows import attention_rows
from kvbench.policies.observation import Observation
from kvbench.policies.policy import Policy
from kvbench.policies.stores.dense import DenseHeld
from kvbench.policies.stores.ott import Ott
from kvbench.policies.stores.store import Held, Store
from kvbench.tasks.niah import Niah
from kvbench.tasks.task import PlainTokenizer

STORES = "kivi_g32_r32,ott_g32_r32_skipnone,kcvc_g32_r32,gear_g32,zipcache,kivi_g32_r32_int4,zipcache_int4"
TRACES = ("smallest", "random", "largest")
QUERIES = 64  # the prompt's last ones, whose attention is compared


class RecordingHeld(DenseHeld):
    """A dense layer that remembers what it was shown."""

    def __init__(self, keys: Tensor, values: Tensor, seen: list[Observation]) -> None:
        super().__init__(keys, values, (), 1)
        self._seen = seen

    @property
    def watching(self) -> bool:
        return True

    def observe(self, observation: Observation, prompts: Sequence[int | None]) -> None:
        self._seen.append(observation)


@dataclass(frozen=True)
class Recording(Store):
    """Keeps everything exactly, and every layer's observation of the prompt."""

    seen: list[Observation]

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> Held:
        return RecordingHeld(keys, values, self.seen)


@torch.inference_mode()
def record(model: PreTrainedModel, ids: Tensor) -> list[Observation]:
    """Queries, keys and values of every layer for one prompt [1,T]."""
    seen: list[Observation] = []
    model(ids, past_key_values=KVCache(model.config, Policy(store=Recording(seen))), logits_to_keep=1)
    return seen


def attention(layer: Observation, keys: Tensor, values: Tensor) -> Tensor:
    """Outputs of the layer's last queries over these keys and values: [1,H,G,QUERIES,D]."""
    rows = attention_rows(
        layer.queries[:, :, -QUERIES:],
        keys,
        layer.query_positions[:, -QUERIES:],
        layer.positions,
        layer.scaling,
        layer.softcap,
        layer.sliding_window,
    )
    return rows @ values[:, :, None].float()


@torch.inference_mode()
def errors(layer: Observation, store: Store) -> tuple[float, float, float]:
    """Relative L1 errors of keys, values and attention after the store has taken the prompt in."""
    held = store.for_layer(layer.layer).open(layer.keys, layer.values, (), 1)
    held.append(layer.keys, layer.values, layer.query_positions, absent=False)
    if held.watching:
        held.observe(layer, [layer.keys.shape[2]])
    held.settle()
    exact = attention(layer, layer.keys, layer.values)
    pairs = (
        (held.keys, layer.keys),
        (held.values, layer.values),
        (attention(layer, held.keys, held.values), exact),
    )
    keys, values, output = (float((x - y).abs().sum() / y.abs().sum()) for x, y in pairs)
    return keys, values, output


@dataclass(frozen=True)
class Row:
    """One line of the table: mean errors over the prompts."""

    name: str
    exact_tokens: int  # chosen ones per KV head (second picture); -1: the store's own way
    layer: int
    keys: float
    values: float
    attention: float


def measure(prompts: Sequence[Sequence[Observation]], name: str, exact: int, store: Store) -> Iterator[Row]:
    """Mean errors of every layer."""
    for layers in zip(*prompts, strict=True):
        found = torch.tensor([errors(layer, store) for layer in layers]).mean(0).tolist()
        yield Row(name, exact, layers[0].layer, *found)


def exact_tokens(group: int, count: int, trace: str) -> Store:
    """2-bit groups with `count` tokens per KV head chosen once from the whole prompt and kept exact, in every layer."""
    return Ott(
        group=group,
        residual=0,
        outliers=count,
        auxiliary=0,
        skip_layers=(),
        prefill_mode="joint",
        trace=trace,
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Attention error by layer and store, and by the number of exact tokens (mean over layers)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name in dict.fromkeys(row.name for row in rows if row.exact_tokens < 0):
        chosen = [row for row in rows if row.name == name and row.exact_tokens < 0]
        left.plot([row.layer for row in chosen], [row.attention for row in chosen], marker="o", label=name)
    left.set(xlabel="layer", ylabel="L1 error of the attention output, relative")
    left.xaxis.get_major_locator().set_params(integer=True)
    for trace in TRACES:
        counts = sorted({row.exact_tokens for row in rows if row.name == trace})
        means = [mean_attention(rows, trace, count) for count in counts]
        right.plot(counts, means, marker="o", label=f"{trace} keys" if trace != "random" else "random")
    right.set(xlabel="exact tokens per KV head", ylabel="the same, mean over layers")
    for axes in (left, right):
        axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
        axes.legend(fontsize="small")
    figure.savefig(path)


def mean_attention(rows: Sequence[Row], name: str, exact: int) -> float:
    chosen = [row.attention for row in rows if row.name == name and row.exact_tokens == exact]
    return sum(chosen) / len(chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with model and tokenizer")
    parser.add_argument("--stores", default=STORES)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=128, help="tokens of a group in the second picture")
    parser.add_argument("--counts", default="0,1,2,4,8,16,32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--out", type=Path, required=True, help="written with .csv and .svg behind it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    model = prepare(AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval())
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    examples = Niah(lengths=(args.length,)).examples(PlainTokenizer(tokenizer), seed=0, limit=args.prompts)
    prompts = [record(model, tokenizer(e.prompt, return_tensors="pt").input_ids) for e in examples]
    rows = [row for slug in args.stores.split(",") for row in measure(prompts, slug, -1, make_policy(slug).store)]
    for trace in TRACES:
        for count in map(int, args.counts.split(",")):
            rows += measure(prompts, trace, count, exact_tokens(args.group, count, trace))

    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("name", "exact_tokens", "layer", "key_error", "value_error", "attention_error"))
        writer.writerows(
            (r.name, r.exact_tokens, r.layer, *(f"{x:.6f}" for x in (r.keys, r.values, r.attention))) for r in rows
        )
    draw(rows, args.out.with_suffix(".svg"))
    table = Table(
        "store",
        "exact tokens",
        "attention error, mean over layers",
        title=f"{args.prompts} prompts of {args.length} tokens",
    )
    for name, exact in dict.fromkeys((row.name, row.exact_tokens) for row in rows):
        table.add_row(name, "" if exact < 0 else str(exact), f"{mean_attention(rows, name, exact):.4f}")
    Console().print(table)


if __name__ == "__main__":
    main()
