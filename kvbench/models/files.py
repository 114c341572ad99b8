"""Finds the files of a model: a folder on this machine, a GGUF file, or a download from the Hub."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from os.path import expanduser
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from kvbench.errors import ConfigError, UsageError
from kvbench.models.gguf import dequantized, described, file_sha256, gguf_source, installed_folder, source_digest

# The files that affect generated tokens, unlike a README or a second copy of the weights.
_TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
WANTED = ("*.safetensors", *_TEXT_FILES)
CONFIG_FILES = ("config.json",)
_UNWANTED = ("consolidated*", "original/*", "training_args*")


@dataclass(frozen=True)
class ModelSpec:
    """The configuration of a model: `conf/model/*.yaml` and the command line.

    The source of the model is the first that is given of path, package, bundled and hub_id.

    name: name in tables. path: a local folder, or a GGUF file. package: an installed package that contains the GGUF
    file. bundled: a folder of this package. hub_id: a model of the Hub, owner/name. revision: its branch, tag or
    commit; None: the newest. gguf_file: a GGUF file in the folder or of the Hub, dequantized once. sha256: the checksum
    of the GGUF file, which is verified wherever the file comes from. dtype: of the weights; auto: that of the files.
    max_prompt_tokens: the length to which tasks cut long prompts; None: the model's positions. system_prompt: a system
    message in the chat template. trust_remote_code: allow code in the model's files to run. device_map: how accelerate
    distributes the layers; None: one device. shape: the shape of the cache, for use without the model's files (see
    `kvbench.models.cache_shapes`).
    """

    name: str
    hub_id: str | None = None
    revision: str | None = None
    bundled: str | None = None
    path: str | None = None
    gguf_file: str | None = None
    sha256: str | None = None
    package: str | None = None
    dtype: str = "auto"
    max_prompt_tokens: int | None = None
    system_prompt: str | None = None
    trust_remote_code: bool = False
    device_map: str | None = None
    shape: Mapping[str, int | list[int]] | None = field(default=None, compare=False)


def model_folder(spec: ModelSpec, wanted: tuple[str, ...]) -> Path:
    """The folder with the model's files; for a hub model, at least the files that match `wanted`.

    For a GGUF file, it has configuration and tokenizer; its weights are in the folder of `weights_folder`.
    """
    file = gguf_file(spec)
    if file is not None:
        return described(file)
    if spec.path is not None:
        return _local_folder(Path(expanduser(spec.path)))
    if spec.bundled is not None:
        return Path(str(resources.files("kvbench") / spec.bundled))
    if spec.hub_id is None:
        raise UsageError(f"model={spec.name} needs model.path=/folder or model.hub_id=owner/name")
    return _download(spec.hub_id, spec, [*wanted, *(["*.py"] if spec.trust_remote_code else [])])


def weights_folder(spec: ModelSpec, folder: Path) -> Path:
    """The folder with the weights of a model whose files are in `folder`: a GGUF file is dequantized once."""
    file = gguf_file(spec)
    return folder if file is None else dequantized(file)


def check_sha256(spec: ModelSpec) -> None:
    """Raise ConfigError for a `sha256` that is no checksum, or that belongs to no file."""
    if spec.sha256 is not None and not re.fullmatch("[0-9a-f]{64}", spec.sha256):
        raise ConfigError("sha256", spec.sha256, "64 hexadecimal digits in lower case, or null")
    if spec.sha256 is not None and spec.gguf_file is None and not str(spec.path).endswith(".gguf"):
        raise ConfigError("sha256", spec.sha256, why="has no effect: it is the checksum of a GGUF file")


def gguf_file(spec: ModelSpec) -> Path | None:
    """The GGUF file of a model; None for safetensors. Raises UsageError if it is missing or has another sha256."""
    if spec.path is not None:
        file = gguf_source(Path(expanduser(spec.path)), spec.gguf_file)
    elif spec.gguf_file is None:
        return None
    elif spec.package is not None:
        file = gguf_source(installed_folder(spec.package), spec.gguf_file)
    elif spec.hub_id is not None:
        file = gguf_source(_download(spec.hub_id, spec, [spec.gguf_file]), spec.gguf_file)
    else:
        raise UsageError(f"model.gguf_file={spec.gguf_file} needs model.path=/folder or model.hub_id=owner/name")
    if file is not None and spec.sha256 is not None and file_sha256(file) != spec.sha256:
        raise UsageError(
            f"model={spec.name}: {file} is damaged or another file: its sha256 is {file_sha256(file)}, not "
            f"{spec.sha256} (another GGUF file is a model of its own: model={file})"
        )
    return file


def model_identity(spec: ModelSpec, folder: Path) -> tuple[tuple[str, str], ...]:
    """What identifies the weights: the sha256 of a GGUF file or of a folder, or a commit of the Hub."""
    file = gguf_file(spec)
    if file is not None:
        return (("gguf_sha256", source_digest(file)),)
    if spec.path is None and spec.bundled is None:
        return (("hub_id", str(spec.hub_id)), ("commit", folder.name))
    return (("sha256", weights_hash(folder)),)


def _local_folder(folder: Path) -> Path:
    if not folder.is_dir():
        hub = f" (for the Hub: model=hub model.hub_id={folder})" if str(folder).count("/") == 1 and folder.name else ""
        raise UsageError(f"model.path={folder} is not a folder on this machine{hub}")
    if not (folder / "config.json").is_file():
        raise UsageError(f"model.path={folder} has no config.json: it must be a folder made by save_pretrained")
    if not any(folder.glob("*.safetensors")):
        raise UsageError(
            f"model.path={folder} has no *.safetensors: of other formats only GGUF is loaded (model.gguf_file=NAME)"
        )
    return folder.resolve()


def _download(hub_id: str, spec: ModelSpec, wanted: list[str]) -> Path:
    """The snapshot folder of a hub model, named after the commit. Without network, the cached files are used."""
    key = (spec.name, hub_id, spec.revision)
    if key in _unavailable:
        raise UsageError(_unavailable[key])
    try:
        folder = snapshot_download(
            hub_id, revision=spec.revision, allow_patterns=wanted, ignore_patterns=list(_UNWANTED)
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        what = hub_id if spec.gguf_file is None else f"{hub_id} {spec.gguf_file}"
        local = "a local folder with model.path=/folder" if spec.gguf_file is None else "a file with model.path=/file"
        _unavailable[key] = (
            f"model={spec.name}: {what} is not in the Hugging Face cache of this machine and cannot be downloaded "
            f"({type(error).__name__}); fetch it with `hf download {what}` (gated models need `hf auth login`), "
            f"or use {local}"
        )
        raise UsageError(_unavailable[key]) from error
    return Path(folder)


_unavailable: dict[tuple[str, str, str | None], str] = {}  # a sweep waits only once for an unreachable hub


def weights_hash(folder: Path) -> str:
    """sha256 over the names and contents of the files that affect generated tokens; cached until one changes."""
    digest = hashlib.sha256()
    unwanted = {f for pattern in _UNWANTED for f in folder.glob(pattern)}
    for file in sorted({f for pattern in WANTED for f in folder.glob(pattern)} - unwanted):
        digest.update(file.name.encode() + b"\0" + bytes.fromhex(file_sha256(file)))
    return digest.hexdigest()
