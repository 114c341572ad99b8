"""A tiny random model with a byte tokenizer, on disk as any other: the whole harness runs on it in milliseconds."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvbench.cli import main

MAX_POSITIONS = 1024


@pytest.fixture(autouse=True, scope="session")
def _no_debugger() -> Iterator[None]:
    """At every error Hydra looks for a debugger in the source of all frames, of which pytest has many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hydra._internal.utils.is_under_debugger", lambda: False)
        yield


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, <s> put in front as Llama's tokenizers do, and </s>; nothing is learnt."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(["<s>", "</s>", *letters])}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def save_tiny_model(folder: Path) -> Path:
    """A random two-layer Llama with grouped queries, saved as safetensors."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def here(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Run command lines on the tiny model in this process, in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        words = [str(argument) for argument in arguments]
        flags = [word for word in words if word == "-m"]  # first: argparse finds no overrides on both sides of one
        code = main([*flags, f"model={tiny_model}", *words[len(flags) :]])
        return (code, *capsys.readouterr())

    return run
