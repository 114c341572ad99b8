"""Makes tests/support importable: tiny models and the slow oracle, shared by several folders of tests."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "support"))
torch.set_num_threads(1)  # the models of these tests are tiny: more threads only get in each other's way
