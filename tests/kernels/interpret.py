"""Run the Triton path of column_sums on the CPU: `TRITON_INTERPRET=1 python interpret.py calls.pt sums.pt`.

A process of its own, because Triton reads TRITON_INTERPRET when it is imported.
"""

import sys

import torch

from kvbench.kernels.column_sums import column_sums_triton

calls = torch.load(sys.argv[1])
torch.save({name: column_sums_triton(**arguments) for name, arguments in calls.items()}, sys.argv[2])
