"""The samples file: what survives a kill, a full disk and a second process."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvbench.results.samples import Sample, open_samples, read_samples


def sample(index: int, output: str = "the answer") -> Sample:
    return Sample(
        index=index,
        prompt_hash="ab" * 32,
        prompt_tokens=100,
        references=["answer"],
        metadata={"length": 1024},
        output=output,
        score=1.0,
        kept_tokens=[[16, 16], [16, 16]],
        cache_bytes=4096,
        peak_bytes=8192,
        full_cache_bytes=16384,
        generated_tokens=4,
        prefill_seconds=0.25,
        decode_seconds=0.5,
    )


def write(path: Path, n: int) -> bytes:
    with open_samples(path) as file:
        for index in range(len(file.samples), n):
            file.append(sample(index))
    return path.read_bytes()


def test_appended_samples_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    odd = 'line\u2028feed\r\n"quoted" 針'
    with open_samples(path) as file:
        file.append(sample(0, odd))
        file.append(sample(1))
    assert read_samples(path) == [sample(0, odd), sample(1)]
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("cut", [1, 2, 50, "half"])
def test_a_cut_off_last_line_is_dropped_and_the_file_ends_equal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int | str
) -> None:
    whole = write(tmp_path / "whole.jsonl", 4)
    line = len(whole) // 4
    path = tmp_path / "samples.jsonl"
    path.write_bytes(whole[: 3 * line - (line // 2 if cut == "half" else int(cut))])
    with caplog.at_level(logging.WARNING):
        assert len(read_samples(path)) == 2
        assert write(path, 4) == whole
    assert "incomplete last line is left out" in caplog.text


@pytest.mark.parametrize("tail", [b"\x00" * 80, b'{"index": 2, "prom\x00\x00', b"\x00" * 5000])
def test_zeros_that_a_power_cut_left_at_the_end_are_removed(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "samples.jsonl"
    good = write(path, 2)
    path.write_bytes(good + tail)
    assert len(read_samples(path)) == 2
    assert write(path, 3)[: len(good)] == good
    assert len(read_samples(path)) == 3


@pytest.mark.parametrize("when", ["write", "sync"])
def test_an_interrupt_keeps_a_line_that_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    path = tmp_path / "samples.jsonl"

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with open_samples(path) as file:
        file.append(sample(0))
        stream = file._stream
        if when == "write":  # a signal between the write and the next line of Python
            file._stream = _Interrupted(stream)
        else:
            monkeypatch.setattr("os.fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            file.append(sample(1))
        monkeypatch.undo()
        file._stream = stream
        assert len(path.read_bytes().splitlines()) == 2
        file.append(sample(2))
    assert read_samples(path) == [sample(0), sample(1), sample(2)]


class _Interrupted:
    def __init__(self, stream: Any) -> None:
        self.stream, self.fileno, self.truncate = stream, stream.fileno, stream.truncate

    def write(self, line: bytes) -> int:
        self.stream.write(line)
        raise KeyboardInterrupt


WRONG = {
    "score": float("nan"),
    "prompt_tokens": 10**400,
    "decode_steps": {},
    "output": {},
    "kept_tokens": [[1, "2"]],
    "references": "a",
    "metadata": [],
    "cache_bytes": True,
    "prefill_seconds": float("inf"),
    "likelihood": {"nll": 1, "tokens": {}, "lengths": [4], "cumulative": [1], "block": None, "max_kept_tokens": [[1]]},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_that_no_run_writes_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, 3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1][name] = WRONG[name]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    field = "tokens" if name == "likelihood" else name
    with pytest.raises(ValueError, match=rf"samples\.jsonl, line 2: {field}=.* is not allowed"):
        read_samples(path)
    with pytest.raises(ValueError, match="line 2"), open_samples(path):
        pass  # an edited line is no cut-off line: it is not thrown away
    assert len(path.read_bytes().splitlines()) == 3


@pytest.mark.parametrize("tail", [b'{"index": 2}\n', b"garbage\n", b"garbage", b"[]\n", b"\xff\xfe\n"])
def test_a_last_line_that_is_no_cut_off_sample_is_an_error_and_stays(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "samples.jsonl"
    good = write(path, 2)
    path.write_bytes(good + tail)
    with pytest.raises(ValueError, match=r"samples\.jsonl, line 3: not the sample of example 2"), open_samples(path):
        pass
    assert path.read_bytes() == good + tail
