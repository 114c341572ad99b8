"""The rows of lm-eval's tasks from a local copy of the data set (`task.data_dir`), read by `datasets`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os.path import expanduser
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvbench.errors import ConfigError

READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
HOW = (
    "`hf download {path} --repo-type dataset --local-dir DIR` where there is a network, then task.data_dir=DIR reads "
    "that copy"
)


@contextmanager
def rows_from(data_dir: str | None) -> Iterator[None]:
    """Inside, lm-eval loads rows from `data_dir` (None: the hub). Raises ValueError that explains how to get them."""
    import datasets

    theirs = datasets.load_dataset  # lm-eval takes no loader of ours, so that its one is replaced for a moment
    with patch.object(datasets, "load_dataset", _loader(theirs, data_dir)):
        yield


def _loader(load: Callable[..., Any], data_dir: str | None) -> Callable[..., Any]:
    from datasets.exceptions import DatasetsError

    def loaded(path: str, name: str | None = None, **kwargs: Any) -> Any:  # noqa: ANN401
        try:
            if data_dir is None or path in READERS.values():
                return load(path, name, **kwargs)
            return _Splits(_local(load, Path(expanduser(data_dir)), path, name))
        except (
            OSError,
            ValueError,
            RuntimeError,
            DatasetsError,
        ) as error:  # no network, no such data set, damaged files
            reason = " ".join(str(error).split())[:160]
            what = f"{path} ({name})" if name else path
            raise ValueError(
                f"{what} cannot be loaded ({type(error).__name__}: {reason}): {HOW.format(path=path)}"
            ) from error

    return loaded


def _local(load: Callable[..., Any], where: Path, path: str, name: str | None) -> Any:  # noqa: ANN401 - a DatasetDict
    """The splits of a copy: a folder of the hub's files, a folder with one for each configuration, or one file."""
    if where.is_file():
        kind = READERS.get(Path(where.name.removesuffix(".gz")).suffix)
        if kind is None:
            raise ConfigError("data_dir", str(where), why=f"must end in one of {', '.join(READERS)}, or be a folder")
        split = next((one for one in ("train", "validation", "test") if one in where.name.lower()), "test")
        return load(kind, data_files={split: str(where)})
    if not where.is_dir():
        raise ConfigError("data_dir", str(where), why="does not exist")
    base = next(one for one in (where / path.split("/")[-1], where) if one.is_dir())
    inner = base / name if name else base
    named = not inner.is_dir() and (base / "README.md").is_file()  # a card that lists configurations
    return load(str(base), name) if named else load(str(inner if inner.is_dir() else base))


class _Splits(dict[str, Any]):
    """The splits; one that is not there has no rows, since few-shot examples need not be had."""

    def __missing__(self, split: str) -> Any:  # noqa: ANN401 - a Dataset
        return next(iter(self.values())).select([])
