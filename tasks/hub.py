"""Files of data sets on the Hugging Face Hub: pinned to a commit, checked by sha256."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from textwrap import shorten
from typing import Any

from kvbench.errors import ConfigError


@dataclass(frozen=True)
class HubFolder:
    """A data set on the Hub from which single files are read.

    repo: its name, owner/name. revision: a commit, or a branch, which may change.
    """

    repo: str
    revision: str

    def file(self, path: str) -> HubFile:
        """One of its files."""
        return HubFile(self.repo, self.revision, path)


@dataclass(frozen=True)
class HubFile:
    """A file of a hub data set at one commit.

    repo: the data set, owner/name. revision: its commit. path: the file in it. sha256: of the file's bytes, checked
    whenever it is opened.
    """

    repo: str
    revision: str
    path: str
    sha256: str | None = None

    @property
    def url(self) -> str:
        """The address of the file's web page."""
        return f"https://huggingface.co/datasets/{self.repo}/resolve/{self.revision}/{self.path}"

    def fetch(self, instead: str) -> Path:
        """Path of the file in the local cache of the hub, downloaded if it is missing.

        Raises ValueError, ending with `instead`, if it cannot be downloaded or its checksum differs.
        """
        from huggingface_hub import hf_hub_download, try_to_load_from_cache  # here: slow to import

        wanted: dict[str, Any] = {"revision": self.revision, "repo_type": "dataset"}
        found = try_to_load_from_cache(self.repo, self.path, **wanted)
        if not isinstance(found, str):
            try:
                with _silent():
                    found = hf_hub_download(self.repo, self.path, **wanted)
            except (OSError, ValueError) as error:  # no network, no such commit, no disk space
                raise ValueError(f"{self.url} cannot be downloaded ({_cause(error)}): {instead}") from error
        path = Path(found)
        if self.sha256 is not None and (found_hash := sha256_of(path)) != self.sha256:
            raise ValueError(
                f"{path} is damaged or another file (sha256 {found_hash[:12]}..., expected {self.sha256[:12]}...): "
                f"delete it, or {instead}"
            )
        return path


def hub_rows(hub: str, subset: str | None, split: str, revision: str | None, named: str = "hub") -> Iterable[Any]:
    """The rows of a data set on the Hub. Raises ConfigError for the field `named` if it cannot be loaded."""
    import datasets  # here: takes a second to import

    try:
        found: Iterable[Any] = datasets.load_dataset(hub, subset, split=split, revision=revision)
    except (OSError, ValueError, KeyError) as error:  # no network, no such name, no such subset or split
        message = " ".join(str(error).split())
        raise ConfigError(
            named,
            hub,
            why=f"cannot be read ({type(error).__name__}: {message:.120}): check hub, subset and split, or "
            "download it elsewhere and give data_dir=<its files>",
        ) from error
    return found


def data_file(
    data_dir: str | None, names: Sequence[str], source: HubFile | None, url: str = "", install: str = ""
) -> Path:
    """The file in `data_dir` with one of these names ("": `data_dir` itself), or else the file on the Hub.

    url: where it is published, if not on the Hub. install: a command that installs a package with the file. Raises
    ValueError with the next step if neither exists.
    """
    install = f", or {install}" if install else ""
    url = url if source is None else source.url
    shown = [name for name in names if name]
    if data_dir is not None:
        paths = [Path(expanduser(data_dir)) / name for name in names]
        path = next((path for path in paths if path.is_file()), None)
        if path is None and not Path(expanduser(data_dir)).exists():
            raise ConfigError("data_dir", data_dir, why="does not exist")
        if path is None:
            raise ConfigError("data_dir", data_dir, why=f"has no {' or '.join(shown)}: download {url} and put it there")
        return path
    if source is None:
        raise ConfigError(
            "data_dir", None, why=f"is not allowed without a source: download {url} and give its folder{install}"
        )
    return source.fetch(f"download it elsewhere and give data_dir=<folder with {shown[0]}>{install}")


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _cause(error: BaseException) -> str:
    """Name and message of the first cause, shortened."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {shorten(str(error), 120, placeholder='...')}"


@contextmanager
def _silent() -> Iterator[None]:
    """Silence the Hub's repeated warnings about a missing network; one error message replaces them."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
