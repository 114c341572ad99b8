"""The samples file: what survives a kill, a full disk and a second process."""

import logging
from pathlib import Path

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


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
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
    assert "incomplete last line is removed" in caplog.text


@pytest.mark.parametrize("tail", [b"\x00" * 80, b'{"index": 2}\n', b"garbage\n", b"garbage", b"[]\n", b"\xff\xfe\n"])
def test_a_last_line_that_is_no_cut_off_sample_is_an_error_and_stays(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "samples.jsonl"
    good = write(path, 2)
    path.write_bytes(good + tail)
    with pytest.raises(ValueError, match=r"samples\.jsonl, line 3: not the sample of example 2"), open_samples(path):
        pass
    assert path.read_bytes() == good + tail
