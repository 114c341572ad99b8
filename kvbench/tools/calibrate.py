"""Calibrates a policy for a model: `kvbench calibrate`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.config.completion import complete_overrides
from kvbench.engine.generate import generate_tokens
from kvbench.errors import UsageError, counted
from kvbench.models.trial import layer_shapes
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import ExtraPasses, TextEncoder
from kvbench.policies.pre_passes.query_centres import QueryCentres
from kvbench.policies.pre_passes.query_moments import QueryMoments
from kvbench.policies.scorers.qfilters import FILTERS
from kvbench.policies.scorers.triattention import NAMES, head_name
from kvbench.terminal.command import PATH, Command, program, quiet, share_cores
from kvbench.terminal.outputs import check_output
from kvbench.tools.kvzap_gate import FORMS, write_gate


class Calibration(NamedTuple):
    """write: compute a calibration of a model over texts [T] of token ids and save it with metadata; the encoder is the
    model's tokenizer. forms: values of the field form=, whose first one is the default; it is part of the metadata."""

    suffix: str
    write: Callable[[PreTrainedModel, Iterable[Tensor], TextEncoder, Path, dict[str, str]], None]
    forms: tuple[str, ...] = ()


def calibrate(calibration: Calibration, fields: Sequence[str], output: Path, config_dir: Path | None = None) -> int:
    """Write the calibration of a model from the prompts of a task; returns the number of texts. Raises UsageError."""
    from kvbench.engine.prompts import make_prompts
    from kvbench.models.loading import load
    from kvbench.models.tokens import Encoder
    from kvbench.terminal.progress import progress
    from kvbench.tools.diagnose import runs_of

    if any(field.startswith("policy=") for field in fields):
        raise UsageError("policy= has no effect here: a calibration belongs to a model")
    form, fields = _form(calibration, fields)
    (cell,) = runs_of(["policy=full", *fields], config_dir)
    texts = [prompt.ids.long() for prompt in make_prompts(cell)]
    loaded = load(cell.checkpoint, cell.device)
    metadata = {"model": cell.checkpoint.spec.name, "task": cell.task.name, **form}
    encoder = Encoder(cell.checkpoint.tokenizer())
    calibration.write(loaded.model, progress(texts, "texts", len(texts)), encoder, output, metadata)
    return len(texts)


def _form(calibration: Calibration, fields: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The form of a calibration as metadata, and the other fields. Raises UsageError."""
    given = [field.removeprefix("form=") for field in fields if field.startswith("form=")]
    for form in given:
        if form not in calibration.forms:
            allowed = f"allowed: {', '.join(calibration.forms)}" if calibration.forms else "it is a field of kvzap"
            raise UsageError(f"form={form} is not allowed ({allowed})")
    others = [field for field in fields if not field.startswith("form=")]
    return {"form": [*given, calibration.forms[0]][0]} if calibration.forms else {}, others


def q_filters(model: PreTrainedModel, texts: Iterable[Tensor]) -> Tensor:
    """The Q-Filters [L,H_kv,D] of a model over texts [T] of token ids, with the sign that their authors give them.

    Raises ValueError for a text of one token, and for a model with layers of different shapes.
    """
    found = QueryMoments(())
    _read_texts(model, texts, lambda text: QueryMoments(text, found.sums, found.squares))
    shapes = set(layer_shapes(model.config).values())
    if len(shapes) > 1:
        raise ValueError("qfilters needs a model with the same number of KV heads, of the same size, in every layer")
    ((heads, *_),) = shapes
    filters: Tensor = -found.directions().unflatten(1, (heads, -1)).mean(2)
    return filters.to(torch.float32)


def query_centres(model: PreTrainedModel, texts: Iterable[Tensor]) -> dict[str, Any]:
    """E q and E|q| of every query head before rotation, in the format of TriAttention's authors.

    Raises ValueError for a text of one token, and for a model that rotates only a part of a head.
    """
    found = QueryCentres(())
    own = found.sums, found.sizes, found.counts, found.interleaved
    _read_texts(model, texts, lambda text: QueryCentres(text, *own))
    stats = {}
    for layer, count in sorted(found.counts.items()):
        means, sizes = found.sums[layer].cpu() / count, found.sizes[layer].cpu() / count
        for head, (mean, size) in enumerate(zip(means, sizes, strict=True)):
            values = mean.real.float().clone(), mean.imag.float().clone(), size.float().clone()
            stats[head_name(layer, head)] = dict(zip(NAMES, values, strict=True))
    heads = [[layer, head] for layer in sorted(found.counts) for head in range(len(found.sums[layer]))]
    metadata = {
        "head_dim": 2 * found.sums[0].shape[-1],
        "rope_style": "interleaved" if found.interleaved[0] else "half",
        "sampled_heads": heads,
        "num_tokens": found.counts[0],
    }
    return {"metadata": metadata, "stats": stats}


def _read_texts(model: PreTrainedModel, texts: Iterable[Tensor], one: Callable[[tuple[int, ...]], ExtraPasses]) -> None:
    """Run a pre-pass over every text but its first token; one: the pre-pass for the tokens after it."""
    for text in texts:
        if len(text) < 2:
            raise ValueError("a text of one token has no query after its first: calibrate on longer texts")
        policy = Policy(pre_pass=one(tuple(text[1:].tolist())), budget=1, name="calibration")
        generate_tokens(model, text[None, :1].to(model.device), policy, max_new_tokens=1)


def _write_filters(
    model: PreTrainedModel, texts: Iterable[Tensor], encoder: TextEncoder, output: Path, metadata: dict[str, str]
) -> None:
    save_file({FILTERS: q_filters(model, texts)}, output, metadata)


def _write_centres(
    model: PreTrainedModel, texts: Iterable[Tensor], encoder: TextEncoder, output: Path, metadata: dict[str, str]
) -> None:
    found = query_centres(model, texts)
    found["metadata"] |= metadata
    torch.save(found, output)


CALIBRATIONS = {
    "kvzap": Calibration(".safetensors", write_gate, FORMS),
    "qfilters": Calibration(".safetensors", _write_filters),
    "triattention": Calibration(".pt", _write_centres),
}


@click.command("calibrate", cls=Command)
@click.argument("name", type=click.Choice(list(CALIBRATIONS)), metavar="NAME")
@click.argument("fields", nargs=-1, metavar="[FIELD=VALUE]...", shell_complete=complete_overrides)
@click.option("-o", "--output", type=PATH, required=True, help="File to write (.safetensors or .pt).")
@click.option("-cd", "--config-dir", type=PATH, help="Folder with your own tasks and models.")
def cli(name: str, fields: Sequence[str], output: Path, config_dir: Path | None) -> None:
    """Calibrate a policy for a model: kvbench calibrate NAME model=... task=... limit=20 -o FILE.

    Fields have the same names as for a run. The texts are the prompts of the task; use a task with long texts
    (task=pg19, task=perplexity task.data_dir=texts).

    \b
    Calibrations:
      qfilters      main query direction of each KV head, for policy=qfilters
                    policy.scorer.filters=FILE (.safetensors)
      triattention  mean query and mean query size of each head, for policy=triattention
                    policy.scorer.stats=FILE (.pt, the format of the authors)
      kvzap         gate that predicts KVzip's scores, for policy=kvzap
                    policy.scorer.gate=FILE (.safetensors); prints R^2 per layer.
                    form=linear (default); form=mlp trains a network and keeps the
                    hidden states of all texts in memory
    """
    calibration = CALIBRATIONS[name]
    check_output(output, [calibration.suffix])
    share_cores()
    quiet()
    count = calibrate(calibration, fields, output, config_dir)
    sys.stdout.write(f"{counted(count, 'text')} -> {output}\n")


main = program(cli)
