"""Decoder layers that torch.compile compiled give the answers of the model, in runs of their own."""

from pathlib import Path

import pytest
import torch
from kv_models import prompt, tiny
from torch import nn

from kvbench import make_policy
from kvbench.cache.hook import prepare
from kvbench.engine.generate import generate_tokens
from kvbench.errors import UsageError
from kvbench.models.compiled import compiled_layers, decoder_layers
from kvbench.run.run import build_run
from kvbench.run.run_config import run_config


def tokens(model: nn.Module, slug: str) -> list[list[int]]:
    return generate_tokens(model, torch.tensor([prompt(60)]), make_policy(slug, 40), max_new_tokens=6).tokens


@pytest.mark.slow("compiles")
def test_compiled_layers_change_no_token_and_are_compiled_only_inside() -> None:
    model = prepare(tiny(dtype=torch.float32))
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        graphs.append(graph)
        return graph.forward

    expected = tokens(model, "caote_snapkv")
    with compiled_layers(model, True, backend):
        assert len(graphs) >= len(decoder_layers(model)), "every layer was compiled by the trial"
        assert tokens(model, "caote_snapkv") == expected
    count = len(graphs)
    assert tokens(model, "caote_snapkv") == expected
    assert len(graphs) == count


@pytest.mark.slow("compiles")
def test_a_model_that_cannot_be_compiled_is_refused_with_one_message() -> None:
    model = prepare(tiny(dtype=torch.float32))

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        raise RuntimeError("no compiler here")

    with (
        pytest.raises(
            UsageError, match=r"^engine.compile=true: LlamaForCausalLM cannot be compiled \(.*use engine.comp"
        ),
        compiled_layers(model, True, backend),
    ):
        pass


def test_a_model_whose_layers_are_in_no_list_is_refused() -> None:
    model = prepare(tiny(dtype=torch.float32))
    model.model.layers = nn.Sequential(*model.model.layers)
    with pytest.raises(UsageError, match="its decoder layers are in no list"), compiled_layers(model, True):
        pass


def test_compilation_is_part_of_the_identity_of_a_run(tiny_model: Path) -> None:
    plain, compiled = (
        build_run(run_config(str(tiny_model), "h2o", "niah", **{"engine.compile": compile})).identity
        for compile in (False, True)
    )
    assert compiled == {**plain, "compile": True}
