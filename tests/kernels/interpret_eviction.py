"""Run kernels on the CPU: `TRITON_INTERPRET=1 python interpret_eviction.py calls.pt results.pt`.

calls: name -> (module, function, arguments). A process of its own, because Triton reads
TRITON_INTERPRET when it is imported. What torch.empty hands out is poisoned: what a kernel forgets to
write is seen.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
calls: dict[str, tuple[str, str, dict[str, Any]]] = torch.load(sys.argv[1], weights_only=False)
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True  # NaN, or the largest integer
torch.save(
    {
        name: getattr(importlib.import_module(module), function)(**arguments)
        for name, (module, function, arguments) in calls.items()
    },
    sys.argv[2],
)
