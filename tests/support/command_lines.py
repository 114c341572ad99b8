"""The commands beside `python -m kvbench`, and the modules whose `main` they are."""

MAINS = {
    "bench": "kvbench.tools.bench.cli",
    "calibrate": "kvbench.tools.calibrate",
    "claims": "kvbench.claims",
    "diagnose": "kvbench.tools.diagnose",
    "memory": "kvbench.memory",
    "plot": "kvbench.plot",
    "report": "kvbench.page.command",
    "results": "kvbench.report.command",
    "score": "kvbench.tools.score",
    "sweep": "kvbench.sweeps.status",
    "tables": "kvbench.papers.cli",
}
