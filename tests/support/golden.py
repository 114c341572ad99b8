"""Arrays recorded from the original codes of methods, outside this repository, one dictionary for each case."""

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from task_data import GOLDEN

Case = dict[str, Any]


def recorded_file(file: str) -> str:
    """The path of a file; the test is skipped where it is not at hand."""
    path = GOLDEN / "additions2" / file
    if not path.is_file():
        pytest.skip(f"the recorded results of the original code are not at {path}")
    return str(path)


def cases(file: str, prefix: str = "") -> list[Case]:
    """The cases of a file: arrays by name, a list where there is one per layer, and meta's fields."""
    return [case for name, case in _read(recorded_file(file)).items() if name.startswith(prefix)]


@cache
def _read(path: str) -> dict[str, Case]:
    found: dict[str, Case] = {}
    with np.load(path) as arrays:
        for key in arrays.files:
            name, _, field = key.partition("/")
            case = found.setdefault(name, {"name": name})
            if field == "meta":
                case |= json.loads(str(arrays[key]))
                continue
            word, _, layer = field.rpartition("/")
            x = torch.from_numpy(arrays[key])
            if layer.isdigit():
                case.setdefault(word, {})[int(layer)] = x
            else:
                case[field] = x
    return {
        name: {k: [v[i] for i in sorted(v)] if isinstance(v, dict) else v for k, v in case.items()}
        for name, case in found.items()
    }
