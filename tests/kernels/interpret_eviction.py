"""Run kernels on the CPU: `TRITON_INTERPRET=1 python interpret_eviction.py calls.pt results.pt`.

calls: name -> (module of kvbench.kernels, function, arguments). A process of its own, because Triton reads
TRITON_INTERPRET when it is imported. Memory that torch.empty hands out is poisoned first: what a kernel forgets to write
is then seen.
"""

import importlib
import sys
from typing import Any

import torch

calls: dict[str, tuple[str, str, dict[str, Any]]] = torch.load(sys.argv[1], weights_only=False)
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True  # NaN, or the largest integer
torch.save(
    {
        name: getattr(importlib.import_module(f"kvbench.kernels.{module}"), function)(**arguments)
        for name, (module, function, arguments) in calls.items()
    },
    sys.argv[2],
)
