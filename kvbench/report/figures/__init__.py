"""Pictures of finished runs, all in one style: see `kvbench.plot` for the command."""
