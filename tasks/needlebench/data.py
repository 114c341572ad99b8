"""NeedleBench's files, from a local copy or from the hub, and the encoding in which its lengths are counted."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from os.path import expanduser
from pathlib import Path
from typing import Any

from kvbench.errors import ConfigError
from kvbench.tasks.extras import from_extra
from kvbench.tasks.hub import HubFolder

HAYSTACKS = {"en": "PaulGrahamEssays.jsonl", "zh": "zh_finance.jsonl"}
NEEDLES = "needles.jsonl"
REASONING = {"en": "multi_needle_reasoning_en.json", "zh": "multi_needle_reasoning_zh.json"}
NAMES = "names.json"
NAMED = {"en": "English", "zh": "Chinese"}  # what the files call a language

ENCODING = "cl100k_base.tiktoken"
ENCODING_URL = f"https://openaipublic.blob.core.windows.net/encodings/{ENCODING}"
ENCODING_SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"


@dataclass(frozen=True)
class Files:
    """NeedleBench's files as they are asked for. data_dir: read instead of the folder on the hub.

    Every method raises ValueError with one sentence where a file cannot be had, or naming file and line or entry where
    it is damaged.
    """

    data_dir: str | None
    source: HubFolder | None

    def haystack(self, language: str) -> list[str]:
        """Texts of the lines, in file order."""
        return [entry["text"] for entry in self._lines(HAYSTACKS[language], ("text",))]

    @cached_property
    def needles(self) -> list[Mapping[str, str]]:
        """All needles, in both languages: needle, retrieval_question, arg1, arg2, language."""
        return self._lines(NEEDLES, ("needle", "retrieval_question", "arg1", "arg2", "language"))

    def reasoning(self, language: str, needles: int) -> list[Mapping[str, Any]]:
        """The entries of multi reasoning with so many needles: derivations, question, answer."""
        path = self._path(REASONING[language])
        entries = _json(path)
        if not isinstance(entries, list):
            raise ValueError(f"{path} is not a list of entries, NeedleBench's file is")
        for number, entry in enumerate(entries, start=1):
            texts = isinstance(entry, dict) and all(isinstance(entry.get(name), str) for name in ("question", "answer"))
            if not texts or not isinstance(entry.get("derivations"), list):
                raise ValueError(f"{path}, entry {number}: lacks derivations, question or answer")
        found = [entry for entry in entries if entry.get("derivation_count") == needles]
        if not found:
            raise ValueError(f"{path} has no entry with derivation_count {needles}")
        return found

    def names(self, language: str) -> list[str]:
        """v2's names of people."""
        path = self._path(NAMES)
        found = _json(path)
        names = found.get(NAMED[language]) if isinstance(found, dict) else None
        if not isinstance(names, str):
            raise ValueError(f"{path} has no names under {NAMED[language]!r}, NeedleBench's file has")
        return names.split(",")

    def _lines(self, name: str, fields: tuple[str, ...]) -> list[Mapping[str, str]]:
        path = self._path(name)
        content = _text(path)
        if not content.strip():
            raise ValueError(f"{path} is empty")
        entries = []
        for number, line in enumerate(content.removesuffix("\n").split("\n"), start=1):  # texts hold other separators
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{path}, line {number}: not JSON, the file is damaged or cut off ({error})"
                ) from error
            missing = [f for f in fields if not isinstance(entry, dict) or not isinstance(entry.get(f), str)]
            if missing:
                raise ValueError(f"{path}, line {number}: has no text in {missing[0]!r}, NeedleBench's lines have")
            entries.append(entry)
        return entries

    def _path(self, name: str) -> Path:
        if self.data_dir is not None:
            path = Path(expanduser(self.data_dir)) / name
            if path.is_file():
                return path
            where = self.source.file(name).url if self.source is not None else "NeedleBench's data set on the hub"
            raise ConfigError("data_dir", self.data_dir, why=f"has no {name}: download {where} and put it there")
        if self.source is None:
            raise ConfigError(
                "data_dir", None, why="is not allowed without a source, NeedleBench's files must come from somewhere"
            )
        return self.source.file(name).fetch(f"download it elsewhere and give data_dir=<folder with {name}>")


def gpt4_encoding(folder: str | None) -> Any:  # noqa: ANN401 - a tiktoken.Encoding
    """The encoding cl100k_base, in which the lengths of NeedleBench are counted.

    folder: holds its file, cl100k_base.tiktoken; None: tiktoken's own cache, or a download.
    Raises ValueError with one sentence where neither is there, or the file is not the published one.
    """
    with from_extra("needlebench", "counting lengths in GPT-4's tokens"):
        import tiktoken  # here: only tasks that count in its tokens need it

    try:
        if folder is None:
            return tiktoken.get_encoding("cl100k_base")
        path = Path(expanduser(folder)) / ENCODING
        if hashlib.sha256(path.read_bytes()).hexdigest() != ENCODING_SHA256:
            raise ValueError(f"{path} is damaged or another file: download {ENCODING_URL} again")
        return _from_file(path, lambda: tiktoken.get_encoding("cl100k_base"))
    except OSError as error:
        raise ValueError(
            f"lengths are counted in GPT-4's tokens, whose encoding cannot be read ({type(error).__name__}): download "
            f"{ENCODING_URL} and give encoding_dir=<its folder>, or count otherwise with counted_in=model"
        ) from error


def _from_file(path: Path, load: Callable[[], Any]) -> Any:  # noqa: ANN401
    """`load()` while tiktoken's cache is a folder that holds this one file, under the name it looks for."""
    variable = "TIKTOKEN_CACHE_DIR"
    before = os.environ.get(variable)
    with tempfile.TemporaryDirectory() as cache:
        name = hashlib.sha1(ENCODING_URL.encode()).hexdigest()
        (Path(cache) / name).write_bytes(path.read_bytes())
        os.environ[variable] = cache
        try:
            return load()
        finally:
            if before is None:
                del os.environ[variable]
            else:
                os.environ[variable] = before


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason}") from error


def _json(path: Path) -> Any:  # noqa: ANN401 - checked by the caller
    try:
        return json.loads(_text(path))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON, it is damaged or cut off ({error})") from error
