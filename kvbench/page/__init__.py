"""The report one can open: finished runs as one self-contained page. `python -m kvbench.report DIR -o report.html`."""
