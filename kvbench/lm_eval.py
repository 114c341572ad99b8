"""`python -m kvbench.lm_eval`, and the script `lm_eval`: see `kvbench.tools.lm_eval_cli`."""

from kvbench.tools.lm_eval_cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
