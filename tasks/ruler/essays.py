"""The essays of RULER's needle tasks: any texts of a folder, cut into words and sentences."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import cycle, islice
from os.path import expanduser
from pathlib import Path

from kvbench.errors import ConfigError
from kvbench.tasks.extras import from_extra
from kvbench.tasks.haystack import read_folder, sentences_of

OFFICIAL_FILE = "PaulGrahamEssays.json"


def essay_words(data_dir: str | None, size: int) -> list[str]:
    """The first `size` words of the texts in a folder, again from the start where they are too few.

    data_dir: holds RULER's PaulGrahamEssays.json, or else .txt files, which are read in the order of their names.
    Raises ValueError with one sentence where there is neither.
    """
    return list(islice(cycle(_words(data_dir)), size))


def rule_sentences(text: str) -> list[str]:
    """Sentences by their closing marks, without the white space around them."""
    return [sentence.strip() for sentence in sentences_of(text)]


def punkt_sentences(text: str) -> list[str]:
    """Sentences as nltk's punkt finds them. ValueError where its data is not installed."""
    with from_extra("ruler", "official=True"):
        from nltk.tokenize import sent_tokenize  # here: only official essays are cut by it

    try:
        sentences: list[str] = sent_tokenize(text)
        return sentences
    except LookupError as error:
        raise ConfigError(
            "official",
            True,
            why="cuts essays by nltk's punkt_tab, which is not installed: python -m nltk.downloader punkt_tab",
        ) from error


@cache
def _words(data_dir: str | None) -> list[str]:
    """All words of the folder; a text that starts or ends with white space has an empty one there, as officially."""
    if data_dir is None:
        raise ConfigError(
            "data_dir",
            None,
            why="is not allowed for essays: give a folder with .txt files, or with the PaulGrahamEssays.json "
            "that NVIDIA/RULER's scripts/data/synthetic/json/download_paulgraham_essay.py fetches",
        )
    path = Path(expanduser(data_dir)) / OFFICIAL_FILE
    if not path.is_file():
        return read_folder(data_dir).split()
    try:
        text = json.loads(path.read_text(encoding="utf-8"))["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged or of another form ({type(error).__name__}: {error})") from error
    words = re.sub(r"\s+", " ", text).split(" ")
    if not text.strip():
        raise ValueError(f"{path} holds no text")
    return words
