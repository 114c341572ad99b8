"""The rows of lm-eval's tasks: from a local copy of the data set, or from the hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvbench.errors import ConfigError
from kvbench.tasks.sandbox import CodeEval
from kvbench.tasks.text_files import rows

SPLITS = {"train": "train", "training": "train", "test": "test", "validation": "validation", "val": "validation"}
SPLITS |= {"valid": "validation", "dev": "validation"}
KINDS = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".json.gz")
CODE_REFUSED = (
    "scoring runs code that the model wrote: allow_code_execution=true permits it, in a sandbox without network, files "
    "or other processes, and for seconds only"
)


@contextmanager
def sources(data_dir: str | None, asked: Collection[str], allow_code: bool) -> Iterator[None]:
    """Inside, lm-eval loads rows from `data_dir` and runs `code_eval` in the sandbox.

    data_dir: None leaves the rows to the hub. asked: the splits whose rows are asked, without which nothing can be run.
    Raises ValueError with one sentence for what cannot be had.
    """
    import datasets
    import evaluate

    local = None if data_dir is None else LocalCopy(Path(expanduser(data_dir)), frozenset(asked))
    rows_from = local or _hub(datasets.load_dataset)
    metric_from = _metrics(evaluate.load, allow_code)
    with patch.object(datasets, "load_dataset", rows_from), patch.object(evaluate, "load", metric_from):
        yield  # lm-eval takes no loader of ours


@dataclass(frozen=True)
class LocalCopy:
    """A folder with the files of a data set as they lie on the hub, or one file of it; called like `load_dataset`.

    asked: the splits that must be there; few-shot examples come from others, which are empty where there is no file.
    """

    folder: Path
    asked: frozenset[str]

    def __call__(self, path: str, name: str | None = None, split: str | None = None, **_: Any) -> Any:  # noqa: ANN401
        """The splits of a data set, or the one that is asked for."""
        splits = Splits(self, self._files(path, name))
        return splits if split is None else splits[split]

    def _files(self, path: str, name: str | None) -> dict[str, list[Path]]:
        """The files of each split; the split of a file that does not say is its stem."""
        if self.folder.is_file():
            return {_split(self.folder): [self.folder]}
        for folder in self._folders(path, name):
            found: dict[str, list[Path]] = {}
            files = [p for p in folder.iterdir() if p.name.endswith(KINDS)] if folder.is_dir() else []
            named = [file for file in files if _words(file)[0] == name]  # `snarks.jsonl` of configuration snarks
            for file in sorted(named or files):
                found.setdefault(_split(file), []).append(file)
            if found:
                return found
        what = "does not exist" if not self.folder.exists() else f"holds no data of {_title(path, name)}"
        raise ConfigError(
            "data_dir", self.folder, why=f"{what}: {_how_to_get(path)}, with files such as {', '.join(KINDS)}"
        )

    def _folders(self, path: str, name: str | None) -> Iterator[Path]:
        """Where the files may lie, the most special place first."""
        for base in (self.folder / path.split("/")[-1], self.folder):
            for inner in (base / name, base) if name else (base,):
                yield from (inner, inner / "data")


class Splits(dict[str, Any]):
    """The rows of each split, read when they are needed. A single file that names no split is the one that is asked."""

    def __init__(self, copy: LocalCopy, files: dict[str, list[Path]]) -> None:
        super().__init__()
        self._copy, self._files = copy, files

    def __missing__(self, split: str) -> Any:  # noqa: ANN401 - a `Dataset`
        files = self._files.get(split) or self._files.get(SPLITS.get(split, split))
        if files is None and split in self._copy.asked:
            only = next(iter(self._files))
            if len(self._files) > 1 or only in SPLITS.values():
                raise ConfigError(
                    "data_dir",
                    self._copy.folder,
                    why=f"has no split {split}: it holds {', '.join(sorted(self._files))}, "
                    f"and the split of a file is a word of its name ({split}.jsonl)",
                )
            files = self._files[only]
        self[split] = self._read(files) if files else self._read(next(iter(self._files.values()))).select([])
        return self[split]

    def _read(self, files: list[Path]) -> Any:  # noqa: ANN401 - a `Dataset`
        from datasets import Dataset

        return Dataset.from_list([row for file in files for row in rows(file, file.name, ())])


def _split(file: Path) -> str:
    """The split a file's name tells, or else what it is called: `gsm8k_test.jsonl`, `test-00000-of-00001.parquet`."""
    stem, split = _words(file)
    return split or stem


def _words(file: Path) -> tuple[str, str | None]:
    """A file's name before its first full stop, without the split and what follows it, and the split it tells."""
    stem = file.name.split(".")[0]
    words = re.split(r"([^A-Za-z0-9]+)", stem)
    at = max((i for i, word in enumerate(words) if word.lower() in SPLITS), default=None)
    return (stem, None) if at is None else ("".join(words[: max(at - 1, 0)]), SPLITS[words[at].lower()])


def _hub(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load_dataset` whose errors are one sentence: what to download, and where to put it."""

    def loaded(path: str, name: str | None = None, **kwargs: Any) -> Any:  # noqa: ANN401
        try:
            return load(path, name, **kwargs)
        except (OSError, ValueError, RuntimeError) as error:  # no network, no such data set, a script that is not run
            reason = " ".join(str(error).split())[:120]
            raise ValueError(
                f"{_title(path, name)} cannot be loaded ({type(error).__name__}: {reason}): {_how_to_get(path)}"
            ) from error

    return loaded


def _title(path: str, name: str | None) -> str:
    return path if name is None else f"{path} ({name})"


def _how_to_get(path: str) -> str:
    return (
        f"`hf download {path} --repo-type dataset --local-dir DIR` where there is a network, then task.data_dir=DIR "
        f"reads that copy"
    )


def _metrics(load: Callable[..., Any], allow_code: bool) -> Callable[..., Any]:
    """`evaluate.load` that gives the sandbox for `code_eval`, or refuses it."""

    def loaded(name: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if name != "code_eval":
            return load(name, *args, **kwargs)
        if not allow_code:
            raise ValueError(CODE_REFUSED)
        return CodeEval()

    return loaded
