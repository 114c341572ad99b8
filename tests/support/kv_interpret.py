"""Run a launcher on the CPU: `TRITON_INTERPRET=1 python kv_interpret.py module function calls.pt out.pt`.

A process of its own, because Triton reads TRITON_INTERPRET when it is imported. Memory that nobody wrote is NaN.
"""

import importlib
import sys

import torch

torch.use_deterministic_algorithms(True)
launcher = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
calls = torch.load(sys.argv[3], weights_only=False)
torch.save({name: tuple(launcher(**arguments)) for name, arguments in calls.items()}, sys.argv[4])
