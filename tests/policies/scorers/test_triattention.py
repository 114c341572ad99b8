"""TriAttention: its scores by hand, kept sets against the equation on un-rotated keys, and its calibration."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_crafted import observed
from kv_models import prompt, tiny
from kv_runs import run_greedy
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel

from kvbench import make_policy
from kvbench.cache.hook import prepare
from kvbench.engine.generate import generate_tokens
from kvbench.policies.model_layer import Rotation
from kvbench.policies.policy import Policy
from kvbench.policies.scorers.triattention import TriAttention
from kvbench.tools.calibrate import main, query_centres

FAMILIES = ("llama", "qwen3")
TEXTS = [torch.tensor(prompt(length, seed=length)) for length in (40, 25)]
HORIZON, LAYERS, QUERY_HEADS, KV_HEADS, DIM = 64, 2, 4, 2, 8


def ready(family: str) -> PreTrainedModel:
    return prepare(tiny(family))


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., str]:
    """Random statistics of a tiny model's heads, in the authors' format; E|q| is at least |E q|."""

    def save(layers: int = LAYERS, heads: int = QUERY_HEADS, frequencies: int = DIM // 2, style: str = "half") -> str:
        generator, stats = torch.Generator().manual_seed(1), {}
        for layer in range(layers):
            for head in range(heads):
                real, imaginary, more = torch.randn(3, frequencies, generator=generator)
                size = torch.hypot(real, imaginary) + more.abs()
                values = {"q_mean_real": real, "q_mean_imag": imaginary, "q_abs_mean": size}
                stats[f"layer{layer:02d}_head{head:02d}"] = values
        torch.save({"metadata": {"rope_style": style}, "stats": stats}, tmp_path / "stats.pt")
        return str(tmp_path / "stats.pt")

    return save


class TurnsByPosition:
    """A layer with one frequency, omega = 1, and a RoPE scaling."""

    def __init__(self, scaling: float = 1.0) -> None:
        self.scaling = scaling

    def rotation(self, positions: Tensor) -> Rotation:
        angles = positions[..., None].float()
        return Rotation(angles.cos() * self.scaling, angles.sin() * self.scaling)


@pytest.mark.parametrize(
    ("scaling", "aggregation", "expected"), [(1, "mean", 2.2508), (1, "max", 2.3186), (3, "mean", 0)]
)
def test_products_worked_by_hand(tmp_path: Path, scaling: float, aggregation: Any, expected: float) -> None:
    """E q = 1, E|q| = 1.25, k = 2i at position 3 with 3 tokens seen, offsets 1 and 2: 2 sin(delta) + 0.5.

    Queries and keys of a model whose RoPE scales by 3 are both three times as long.
    """
    values = {"q_mean_real": [1.0], "q_mean_imag": [0.0], "q_abs_mean": [1.25]}
    stats = {"layer00_head00": {name: torch.tensor(x) for name, x in values.items()}}
    torch.save({"metadata": {}, "stats": stats}, tmp_path / "one.pt")
    layer = TurnsByPosition(scaling)
    rotated = layer.rotation(torch.tensor([[[3]]])).apply(torch.tensor([[[[0.0, 2.0]]]]))
    scorer = TriAttention(str(tmp_path / "one.pt"), horizon=2, aggregation=aggregation)
    got = scorer.products(observed(rotated, seen=3, model=layer))
    assert got.item() == pytest.approx(expected or scaling**2 * 2.2508, abs=5e-4)


# --- against the equation ------------------------------------------------------------------------------------------
@contextmanager
def unrotated_keys(model: PreTrainedModel) -> Iterator[list[list[Tensor]]]:
    """Keys before rotation [H_kv,D] of the sequence, by layer and position, as the model's projections give them."""
    found: list[list[Tensor]] = [[] for _ in range(LAYERS)]

    def note(layer: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, out: Tensor) -> None:
            found[layer] += list(out.reshape(-1, KV_HEADS, DIM))

        return hook

    attentions = [layer.self_attn for layer in model.model.layers]
    hooks = [
        getattr(one, "k_norm", one.k_proj).register_forward_hook(note(layer)) for layer, one in enumerate(attentions)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@cache
def read(file: str) -> dict[str, dict[str, list[float]]]:
    stats = torch.load(file, weights_only=True)["stats"]
    return {head: {name: x.tolist() for name, x in values.items()} for head, values in stats.items()}


def score(
    file: str, layer: int, head: int, key: Tensor, position: int, seen: int, theta: float, largest: bool
) -> float:
    """S_h(p), with the un-rotated key and its position."""
    stats = read(file)[f"layer{layer:02d}_head{head:02d}"]
    half, offsets = DIM // 2, [2**n for n in range(HORIZON.bit_length())]
    total, sums = 0.0, [0.0] * len(offsets)
    for f in range(half):
        omega = theta ** (-2 * f / DIM)
        mean, k = complex(stats["q_mean_real"][f], stats["q_mean_imag"][f]), complex(key[f], key[f + half])
        phase = mean * k.conjugate()
        angle = math.atan2(phase.imag, phase.real)
        for n, offset in enumerate(offsets):
            sums[n] += abs(mean) * abs(k) * math.cos(omega * (seen - position + offset) + angle)
        total += (float(stats["q_abs_mean"][f]) - abs(mean)) * abs(k)
    return total + (max(sums) if largest else sum(sums) / len(sums))


def kept_by(raw: list[list[float]], held: list[int], stays: set[int], budget: int) -> list[int]:
    """The tokens of one KV head after an eviction; raw: the scores of its query heads, in the order of `held`."""
    free = [i for i, position in enumerate(held) if position not in stays]
    best = [-math.inf] * len(held)
    for row in raw:
        mean = sum(row[i] for i in free) / len(free)
        deviation = max(math.sqrt(sum((row[i] - mean) ** 2 for i in free) / len(free)), 1e-6)
        best = [max(b, (x - mean) / deviation) for b, x in zip(best, row, strict=True)]
    order = sorted(free, key=lambda i: (-best[i], held[i]))[: budget - (len(held) - len(free))]
    return sorted([*(held[i] for i in order), *(position for position in held if position in stays)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"budget": 20, "protect": "none", "every": 5}, 33),
        ({"budget": 30, "protect": "prompt", "every": 6, "aggregation": "max"}, 22),
        ({"budget": 16, "protect": "none", "every": 4, "recent": 7}, 25),
    ],
)
def test_kept_tokens_follow_from_the_equation(
    saved: Callable[..., str], family: str, fields: dict[str, Any], tokens: int
) -> None:
    model, file, new = ready(family), saved(), 20
    policy = make_policy("triattention", stats=file, horizon=HORIZON, **fields)
    run_greedy(model, [prompt(tokens)], policy, 1)  # the first use tries how the model rotates, with tokens of its own
    with unrotated_keys(model) as keys:
        run = run_greedy(model, [prompt(tokens)], policy, new)
    theta = model.config.rope_parameters["rope_theta"]
    budget, every = fields["budget"], fields["every"]
    held = [[list(range(tokens)) for _ in range(KV_HEADS)] for _ in range(LAYERS)]
    for call, kept in enumerate(run.of_row(0)):
        seen = tokens + call
        for layer in range(LAYERS):
            for head in range(KV_HEADS):
                own = held[layer][head]
                own += [seen - 1] * (call > 0)
                if len(own) > budget if call == 0 else len(own) >= budget + every:
                    stays = set(range(tokens)) if fields["protect"] == "prompt" else set()
                    stays |= set(range(seen - fields.get("recent", 0), seen))
                    how = seen, theta, fields.get("aggregation") == "max"
                    raw = [
                        [score(file, layer, 2 * head + g, keys[layer][p][head], p, *how) for p in own] for g in range(2)
                    ]
                    own[:] = kept_by(raw, own, stays, budget)
                assert list(kept[layer][head]) == own, (call, layer, head)
    assert len(held[0][0]) < tokens + new - 1, "something was evicted"


# --- calibration ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_the_calibration_is_the_mean_of_the_queries_before_rotation(family: str) -> None:
    """After the query norm of Qwen3, in the code of transformers."""
    model, found = tiny(family), [[] for _ in range(LAYERS)]
    attentions = [layer.self_attn for layer in model.model.layers]
    for layer, one in enumerate(attentions):
        module = getattr(one, "q_norm", one.q_proj)
        module.register_forward_hook(
            lambda _, args, out, layer=layer: found[layer].append(out.reshape(-1, QUERY_HEADS, DIM)[1:].double())
        )
    for text in TEXTS:
        model(text[None])
    expected = [torch.cat(some) for some in found]
    model.set_attn_implementation("kvbench")
    got = query_centres(model, TEXTS)
    assert got["metadata"]["head_dim"] == DIM
    assert got["metadata"]["rope_style"] == "half"
    assert got["metadata"]["num_tokens"] == sum(map(len, TEXTS)) - len(TEXTS)
    assert len(got["stats"]) == LAYERS * QUERY_HEADS
    for layer, queries in enumerate(expected):
        for head in range(QUERY_HEADS):
            real, imaginary = queries[:, head].chunk(2, dim=-1)
            stats = got["stats"][f"layer{layer:02d}_head{head:02d}"]
            close = {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(stats["q_mean_real"], real.mean(0).float(), **close)
            torch.testing.assert_close(stats["q_mean_imag"], imaginary.mean(0).float(), **close)
            torch.testing.assert_close(stats["q_abs_mean"], torch.hypot(real, imaginary).mean(0).float(), **close)


def test_the_policy_reads_the_files_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pocket.pt"
    line = ["triattention", "model=pocket", "task=niah", "task.lengths=[200]", "limit=2", "-o"]
    assert main([*line, str(path)]) == 0
    assert capsys.readouterr().out == f"2 texts -> {path}\n"
    assert make_policy("triattention", 64, stats=str(path)).budget == 64
    assert main([*line, str(tmp_path / "pocket.safetensors")]) == 2
    assert ".pt" in capsys.readouterr().err


# --- refusals ------------------------------------------------------------------------------------------------------
def generate(model: PreTrainedModel, policy: Policy, tokens: int = 40) -> None:
    generate_tokens(model, torch.tensor([prompt(tokens)]), policy, max_new_tokens=2)


def test_what_is_no_file_of_this_model_is_refused(tmp_path: Path, saved: Callable[..., str]) -> None:
    (tmp_path / "text.pt").write_text("no tensors")
    torch.save({"other": 1}, tmp_path / "other.pt")
    for given, sentence in (
        ("", "stats= must name a file of query statistics; create one with `kvbench calibrate triattention`"),
        (str(tmp_path / "none"), "stats=.*none is not a file"),
        (str(tmp_path / "text.pt"), "must be a file of tensors saved by torch.save"),
        (str(tmp_path / "other.pt"), "must contain `stats` with q_mean_real, q_mean_imag, q_abs_mean of every head"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make_policy("triattention", 20, stats=given)
    model, fields = ready("llama"), {"protect": "none"}
    for wrong, sentence in (
        ({"layers": 1}, "it has no layer01_head00"),
        ({"heads": 5}, "it has more than 4 query heads in layer 0"),
        ({"frequencies": 6}, "it has heads of 12, layer 0 has heads of 8"),
        ({"style": "interleaved"}, "it pairs channels in style 'interleaved', the model in style 'half'"),
    ):
        policy = make_policy("triattention", 20, stats=saved(**wrong), **fields)
        with pytest.raises(ValueError, match=sentence):
            generate(model, policy)


def test_what_the_method_does_not_define_is_refused(saved: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match="horizon must be a power of two, such as 65536, got 3"):
        make_policy("triattention", 20, stats=saved(), horizon=3)
    with pytest.raises(ValueError, match="protect=prompt keeps all 40 tokens of the prompt and at least one generated"):
        generate(ready("llama"), make_policy("triattention", 40, stats=saved()))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    partial = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=512, **sizes)).eval()  # rotates a quarter of each head
    partial.set_attn_implementation("kvbench")
    with pytest.raises(ValueError, match="rotates 2 of 8 channels"):
        generate(partial, make_policy("triattention", 20, stats=saved(), protect="none"))
    with pytest.raises(ValueError, match="rotates 2 of 8 channels of a head in layer 0"):
        query_centres(partial, TEXTS)
