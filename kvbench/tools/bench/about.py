"""What each protocol measures, by its name: what `--help` lists without importing torch."""

ABOUT = {
    "cake_table13": "seconds of prefill and ms per decoded token against prompt length, 7k to 130k",
    "cake_fig7": "peak memory and ms per decoded token against prompt length (the cells of cake_table13)",
    "d2o_table5": (
        "tokens per second and the largest batch, budget = prompt length; also per sequence and at equal batches"
    ),
    "d2o_table12": "seconds of a whole answer, its prefill and one token, batch 1, budget 256",
    "ott_fig3": "throughput and memory of 2-bit stores against the batch, 64 tokens in and 384 out",
    "sweep": "the engine against lone runs: 36 variants of one prompt; ms of a step against the rows in it",
    "kernels": "every kernel beside its rivals, checked first: ms, share of a copy's bandwidth, TFLOP/s",
    "targets": "what kvbench promises on a GPU: speed-ups, the cost of evicting, memory; each with its bound",
}
