"""NeedleBench's files, from a local copy or the Hub, and the encoding in which its lengths are counted."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from os.path import expanduser
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvbench.errors import from_extra
from kvbench.tasks.hub import HubFolder, data_file
from kvbench.tasks.text_files import Row, rows

HAYSTACKS = {"en": "PaulGrahamEssays.jsonl", "zh": "zh_finance.jsonl"}
NEEDLES = "needles.jsonl"
REASONING = {"en": "multi_needle_reasoning_en.json", "zh": "multi_needle_reasoning_zh.json"}
NAMES = "names.json"
NAMED = {"en": "English", "zh": "Chinese"}  # names of the languages in the files

ENCODING = "cl100k_base.tiktoken"
ENCODING_URL = f"https://openaipublic.blob.core.windows.net/encodings/{ENCODING}"
ENCODING_SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"


@dataclass(frozen=True)
class Files:
    """NeedleBench's files, read on request. data_dir: a local folder, which replaces the folder on the Hub.

    Every method raises ValueError if a file is not available or, naming file and row, if it is damaged.
    """

    data_dir: str | None
    source: HubFolder | None

    def haystack(self, language: str) -> list[str]:
        """Texts of the lines, in file order."""
        return [row["text"] for row in self._rows(HAYSTACKS[language], ("text",))]

    @cached_property
    def needles(self) -> list[Row]:
        """All needles, in both languages: needle, retrieval_question, arg1, arg2, language."""
        return list(self._rows(NEEDLES, ("needle", "retrieval_question", "arg1", "arg2", "language")))

    def reasoning(self, language: str, needles: int) -> list[Row]:
        """The entries of multi reasoning with this number of needles: derivations, question, answer."""
        name = REASONING[language]
        found = self._rows(name, ("question", "answer"), ("derivations",))
        chosen = [row for row in found if row.get("derivation_count") == needles]
        if not chosen:
            raise ValueError(f"{name} has no entry with derivation_count {needles}")
        return chosen

    def names(self, language: str) -> list[str]:
        """v2's names of people."""
        (row,) = self._rows(NAMES, (NAMED[language],))
        return str(row[NAMED[language]]).split(",")

    def _rows(self, name: str, fields: Sequence[str], lists: Sequence[str] = ()) -> Iterator[Row]:
        source = None if self.source is None else self.source.file(name)
        path = data_file(self.data_dir, (name,), source, "NeedleBench's data set from the Hub")
        return rows(path, name, fields, lists)


def gpt4_encoding(folder: str | None) -> Any:  # noqa: ANN401 - a tiktoken.Encoding
    """The encoding cl100k_base, in which the lengths of NeedleBench are counted.

    folder: the folder with its file, cl100k_base.tiktoken; None: tiktoken's own cache, or a download.
    Raises ValueError if neither is available, or if the file differs from the published one.
    """
    with from_extra("needlebench", "counting lengths in GPT-4's tokens"):
        import tiktoken  # here: optional

    try:
        if folder is None:
            return tiktoken.get_encoding("cl100k_base")
        path = Path(expanduser(folder)) / ENCODING
        if hashlib.sha256(path.read_bytes()).hexdigest() != ENCODING_SHA256:
            raise ValueError(f"{path} is damaged or another file: download {ENCODING_URL} again")
        with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, {"TIKTOKEN_CACHE_DIR": cache}):
            # tiktoken looks for this name in its cache
            Path(cache, hashlib.sha1(ENCODING_URL.encode()).hexdigest()).write_bytes(path.read_bytes())
            return tiktoken.get_encoding("cl100k_base")
    except OSError as error:
        raise ValueError(
            f"the encoding of GPT-4's tokens, in which lengths are counted, cannot be read ({type(error).__name__}): "
            f"download {ENCODING_URL} and give encoding_dir=<its folder>, or set counted_in=model"
        ) from error
