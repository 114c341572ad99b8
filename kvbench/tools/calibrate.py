"""Calibrates a policy for a model: `python -m kvbench.calibrate NAME model=... task=... limit=20 -o FILE`.

The fields are those of `python -m kvbench`. The texts are the prompts of the task; use a task with long texts
(task=pg19, task=perplexity task.data_dir=texts). Calibrations:

  qfilters    mean query directions of each head, for policy=qfilters policy.scorer.filters=FILE
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine.generate import generate_tokens
from kvbench.models.trial import layer_shapes
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.query_moments import QueryMoments
from kvbench.policies.scorers.qfilters import FILTERS
from kvbench.terminal.command import Parser, command
from kvbench.terminal.console import quiet, share_cores
from kvbench.terminal.errors import UsageError
from kvbench.terminal.outputs import check_output


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Compute one calibration, write its file and return the exit code; 2 for wrong values."""
    parser = Parser("python -m kvbench.calibrate", description=__doc__)
    parser.add_argument("name", choices=["qfilters"], metavar="NAME")
    parser.add_argument("field", nargs="*", default=[], help="model=... task=... limit=20 ...")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file to write (.safetensors)")
    parser.add_argument("-cd", "--config-dir", help="folder with your own tasks and models")
    given = parser.parse_intermixed_args(arguments)
    check_output(given.output, [".safetensors"])
    share_cores()
    quiet()
    count = calibrate(given.field, given.output, given.config_dir)
    sys.stdout.write(f"{count} texts -> {given.output}\n")
    return 0


def calibrate(fields: Sequence[str], output: Path, config_dir: str | None = None) -> int:
    """Write the filters of a model from the prompts of a task; returns the number of texts. Raises UsageError."""
    from kvbench.engine.prompts import make_prompts
    from kvbench.models.loading import load
    from kvbench.terminal.bars import progress
    from kvbench.tools.diagnose import cells_of

    if any(field.startswith("policy=") for field in fields):
        raise UsageError("policy= has no effect here: a calibration belongs to a model")
    (cell,) = cells_of(["policy=full", *fields], config_dir)
    texts = [prompt.ids.long() for prompt in make_prompts(cell)]
    model = load(cell.checkpoint, cell.device).model
    filters = q_filters(model, progress(texts, "texts", len(texts)))
    save_file({FILTERS: filters}, output, {"model": cell.checkpoint.spec.name, "task": cell.task.name})
    return len(texts)


def q_filters(model: PreTrainedModel, texts: Iterable[Tensor]) -> Tensor:
    """The Q-Filters [L,H_kv,D] of a model over texts [T] of token ids, with the sign that their authors give them.

    Raises ValueError for a text of one token, and for a model with layers of different shapes.
    """
    found = QueryMoments(())
    for text in texts:
        if len(text) < 2:
            raise ValueError("a text of one token has no query after its first: calibrate on longer texts")
        one = QueryMoments(tuple(text[1:].tolist()), found.sums, found.squares)
        policy = Policy(pre_pass=one, budget=1, name="calibration")
        generate_tokens(model, text[None, :1].to(model.device), policy, max_new_tokens=1)
    shapes = set(layer_shapes(model.config).values())
    if len(shapes) > 1:
        raise ValueError("qfilters takes a model whose layers have the same number of KV heads, of one size")
    ((heads, *_),) = shapes
    filters: Tensor = -found.directions().unflatten(1, (heads, -1)).mean(2)
    return filters.to(torch.float32)
