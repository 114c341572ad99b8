"""D2O: layer budgets by variance, and merging what is evicted. Tables 1 to 21."""

from kvbench.papers.claims.claim import Cell, Claim, Trial
from kvbench.papers.claims.printed import EACH, Compared, Computed, Unprinted, Versus, values

RIVALS = ("local_window", "streamingllm", "h2o", "roco", "cam")
BEST: tuple[Versus, ...] = (("d2o", RIVALS),)
COPIED = ("snapkv", "streamingllm", "h2o", "pyramidkv")
COQA = ("coqa", "trec")
LENGTHS = ((256, 1024), (512, 2048), (1024, 4096), (2048, 8192))


def trial(task: str, rivals: tuple[str, ...] = RIVALS, apart: bool = False, model: str = "llama3_8b") -> Trial:
    return Trial(tuple(("d2o", rival) for rival in rivals), model, task, (0.2,), "", apart)


def per_sequence() -> tuple[Cell, ...]:
    """D2O's tokens per second and sequence less the full cache's: table 5 divided by its batches."""
    speed, batch = throughput(), batches()
    cells = []
    for task in dict.fromkeys(task for _, task in speed):
        own, full = (speed[method, task] / batch[method, task] for method in ("d2o", "full"))
        sizes = f"batch {batch['d2o', task]:g} against {batch['full', task]:g}"
        where = f"table5 {task}, {sizes}: {own:.1f} against {full:.1f} tokens/s a sequence:"
        cells.append(Cell(where, round(own - full, 6)))
    return tuple(cells)


def whole_batch() -> tuple[Cell, ...]:
    """D2O's tokens per second over the full cache's as printed, each at its own batch."""
    speed = throughput()
    tasks = dict.fromkeys(task for _, task in speed)
    return tuple(
        Cell(
            f"table5 {task}: {speed['d2o', task]} / {speed['full', task]}:",
            speed["d2o", task] / speed["full", task],
            2.0,
        )
        for task in tasks
    )


def throughput() -> dict[tuple[str, str], float]:
    return values("d2o/table5", metric="tokens_per_s")


def batches() -> dict[tuple[str, str], float]:
    return values("d2o/table5", metric="max_batch_size")


CLAIMS = (
    Claim(
        "d2o",
        "best-task",
        "D2O significantly outperforms other eviction-based methods",
        "5.3",
        "table 2: every model and task against the best of five methods at 20%",
        Compared(("d2o/table2",), BEST, tasks=EACH),
        trial=trial("longbench_e", apart=True),
        note="the released classes never compress layers 0, 1 and the last: about 27.5% kept against 20% for H2O",
    ),
    Claim(
        "d2o",
        "best-on-average",
        "D2O significantly outperforms other eviction-based methods",
        "5.3",
        "table 2: mean gain over the best of five methods",
        Compared(("d2o/table2",), BEST, tasks=EACH),
        says="average",
        trial=trial("longbench_e"),
    ),
    Claim(
        "d2o",
        "mistral-above-h2o",
        "on Mistral-7B D2O exceeds H2O in all 16 tasks",
        "table 2",
        "each task of Mistral-7B-Instruct-v0.2 at 20% against H2O",
        Compared(("d2o/table2",), (("d2o", ("h2o",)),), tasks=EACH, models=("Mistral-7B-Instruct-v0.2",)),
        ours=True,
        trial=trial("longbench_e", ("h2o",), apart=True, model="mistral_7b_instruct_v02"),
    ),
    Claim(
        "d2o",
        "code-34b",
        "D2O's performance surpasses other eviction-based baselines and closely matches the results of the Full Cache",
        "5.3",
        "table 1: LCC and RepoBench-P of CodeLlama-34B against the best of five methods",
        Compared(("d2o/table1",), BEST, tasks=EACH),
        trial=trial("longbench/lcc", model="codellama_34b"),
    ),
    Claim(
        "d2o",
        "code-34b-full",
        "closely matches the results of the Full Cache",
        "5.3",
        "table 1: within one point of the full cache",
        Compared(("d2o/table1",), (("d2o", ("full",)),), tasks=EACH, least=-1.0),
        trial=Trial((("d2o", "full"),), "codellama_34b", "longbench/lcc", (0.2,), least=-0.01),
    ),
    Claim(
        "d2o",
        "beats-full-base",
        "D2O matches or beats the full cache in most tasks of Llama-3-8B",
        "table 2",
        "each task of Llama-3-8B at 20% less the full cache's",
        Compared(("d2o/table2",), (("d2o", ("full",)),), tasks=EACH, models=("Llama-3-8B",), least=-1e-9),
        says="most",
        ours=True,
        trial=trial("longbench", ("full",), apart=True),
        note="the full cache is near the floor there: a base model without few-shot prompts",
    ),
    Claim(
        "d2o",
        "components",
        "the removal of any component of D2O results in performance degradation",
        "5.6",
        "table 6: without layer budgets, without the threshold, without both",
        Compared(
            ("d2o/table6",),
            tuple(("d2o", (f"d2o_{without}",)) for without in ("no_layer", "no_ema", "no_layer_no_ema")),
            tasks=EACH,
        ),
        trial=trial("longbench/gov_report", ("d2o_no_layer", "d2o_no_ema", "d2o_no_layer_no_ema")),
    ),
    Claim(
        "d2o",
        "merging-alone",
        "but still better than the H2O method, which is purely evicted-based",
        "5.6",
        "table 6: merging alone, without layer budgets and threshold, against H2O",
        Compared(("d2o/table6",), (("d2o_no_layer_no_ema", ("h2o",)),), tasks=EACH),
        trial=Trial((("d2o_no_layer_no_ema", "h2o"),), "llama3_8b", "longbench/gov_report", (0.2,)),
        note="H2O's MultiFieldQA-en is 17.22 here and 17.72 in table 2",
    ),
    Claim(
        "d2o",
        "allocation-best",
        "leading to superior performance in key metrics",
        "5.4",
        "table 4: inverse-variance softmax against reciprocal, uniform and exponential",
        Compared(
            ("d2o/table4",),
            tuple(("d2o", (f"d2o_alloc_{other}",)) for other in ("recip_var", "uniform", "exp_decay")),
            tasks=COQA,
        ),
        trial=trial("longbench_e", ("d2o_alloc_recip_var", "d2o_alloc_uniform")),
        note="exponential is not normalised: another total budget",
    ),
    Claim(
        "d2o",
        "keys-for-similarity",
        "exhibit significantly higher performance than the attention values",
        "5.6",
        "table 7: similarity of keys against values, and of both apart",
        Compared(("d2o/table7",), (("d2o", ("d2o_sim_v",)), ("d2o", ("d2o_sim_k_v_separate",))), tasks=COQA),
        trial=trial("longbench/trec", ("d2o_sim_v", "d2o_sim_k_v_separate")),
    ),
    Claim(
        "d2o",
        "weighted-merge",
        "the weighted average policy can achieve better performance",
        "5.6",
        "table 8: weighted against average merging",
        Compared(("d2o/table8",), (("d2o", ("d2o_merge_avg",)),), tasks=COQA),
        trial=trial("longbench/trec", ("d2o_merge_avg",)),
        note="the two weightings differ little (worked example of the spec: (5.03, 4.34) against (5, 4.33))",
    ),
    Claim(
        "d2o",
        "three-to-one",
        "the ratio of N:M =3:1 yielded the best performance across most datasets",
        "A.3",
        "tables 9 and 10: N:M = 3:1 against each other ratio",
        Compared(
            ("d2o/table9", "d2o/table10"),
            tuple(("d2o", (f"d2o_{ratio}",)) for ratio in ("n2_m1", "n1_m1", "n1_m2", "n1_m3")),
            tasks=(*COQA, "gsm8k", "truthfulqa_gen"),
        ),
        says="most",
        trial=trial("longbench/trec", ("d2o_n2_m1", "d2o_n1_m1", "d2o_n1_m2", "d2o_n1_m3")),
        note="the two tables print 59.25 and 57.92 for the same setting on CoQA",
    ),
    Claim(
        "d2o",
        "needle",
        "not only outperforms other eviction-based methods but also exhibits the smallest drop in performance accuracy",
        "5.3",
        "table 3: needle accuracy against each other method at 4096 and 8192",
        Compared(
            ("d2o/table16",),
            (("d2o", ("streamingllm", "h2o", "snapkv", "cam")),),
            tasks=("niah_50k", "niah_100k"),
            metric="accuracy",
        ),
        trial=Trial(
            tuple(("d2o", rival) for rival in ("streamingllm", "h2o", "snapkv", "cam")),
            "llama2_7b_80k",
            "niah_text",
            (4096, 8192),
        ),
    ),
    Claim(
        "d2o",
        "newer-baselines",
        "D2O consistently outperforms these baseline methods across most datasets",
        "A.8",
        "table 18: eight tasks against the best of SnapKV, PyramidKV, PyramidInfer, SirLLM and LoCoCo",
        Compared(("d2o/table18",), (("d2o", ("snapkv", "pyramidkv", "pyramidinfer", "sirllm", "lococo")),), tasks=EACH),
        says="most",
        trial=trial("longbench_e", ("snapkv", "pyramidkv"), apart=True, model="mistral_7b_instruct_v02"),
    ),
    Claim(
        "d2o",
        "infinitebench-ruler",
        "demonstrate that D2O consistently outperforms these baselines across both InfiniteBench and RULER",
        "A.10",
        "tables 19 and 20: every task and length against the best of H2O, PyramidKV and CaM",
        Compared(("d2o/table19", "d2o/table20"), (("d2o", ("h2o", "pyramidkv", "cam")),), tasks=EACH),
        trial=trial("ruler_13", ("h2o", "pyramidkv", "cam"), apart=True, model="llama31_8b_instruct"),
    ),
    Claim(
        "d2o",
        "size-64",
        "under extreme compression settings (KV size = 64), D2O outperforms all baselines",
        "A.11",
        "table 21 at 64: every task against the best of SnapKV, StreamingLLM, H2O and PyramidKV",
        Compared(("d2o/table21",), (("d2o", COPIED),), tasks=EACH, budgets=(64,)),
        trial=Trial(tuple(("d2o", rival) for rival in COPIED), "llama3_8b_instruct", "longbench", (64,), apart=True),
        note="the baselines' rows were copied from the PyramidKV paper",
    ),
    Claim(
        "d2o",
        "size-2048",
        "at 2048 D2O leads the compressed methods in most tasks",
        "table 21",
        "table 21 at 2048: every task against the best of the four",
        Compared(("d2o/table21",), (("d2o", COPIED),), tasks=EACH, budgets=(2048,)),
        says="most",
        ours=True,
        trial=Trial(tuple(("d2o", rival) for rival in COPIED), "llama3_8b_instruct", "longbench", (2048,), apart=True),
    ),
    Claim(
        "d2o",
        "long-prompts",
        "still demonstrates significant advantages even on datasets larger than 8k",
        "A.6",
        "table 17: eight tasks, two models, against the best of five methods",
        Compared(("d2o/table17",), BEST, tasks=EACH, metric="score"),
        trial=trial("longbench_e", apart=True),
        note="the sentence's gains of 5.94 and 7.23 are 6.76 and 7.33 in its table",
    ),
    Claim(
        "d2o",
        "throughput-printed",
        "D2O's throughput advantage over the entire model also grows",
        "5.5",
        "table 5: tokens per second over the full cache's, each at its own batch: at least twice",
        Computed(whole_batch, "times"),
    ),
    Claim(
        "d2o",
        "throughput-per-sequence",
        "reducing the KV cache with D2O significantly enhances real-world throughput",
        "5.5",
        "table 5: tokens per second divided by the batch, less the full cache's",
        Computed(per_sequence, "tokens/s a sequence"),
        elsewhere="python -m kvbench.bench (decode, full and d2o at equal batch, then each at its largest)",
        note="the 2.3 to 3.0 times are a batch 4 times as large, which no memory limit asks for (1.25 GiB of 80)",
    ),
    Claim(
        "d2o",
        "throughput-h2o",
        "our method achieves throughput comparable to H2O for long sequence inference",
        "5.5",
        "table 5: tokens per second within 10% of H2O's at the same batch",
        Compared(
            ("d2o/table5",),
            (("d2o", ("h2o",)),),
            tasks=tuple(f"throughput_{prompt}_{new}" for prompt, new in LENGTHS),
            metric="tokens_per_s",
            relative=True,
            least=-10.0,
        ),
        elsewhere="python -m kvbench.bench (decode, d2o and h2o)",
    ),
    Claim(
        "d2o",
        "merge-is-light",
        "the merging strategy are lightweight and do not affect the overall inference efficiency",
        "A.5",
        "table 13: total seconds at most 5% above H2O's",
        Compared(
            ("d2o/table13",),
            (("d2o", ("h2o",)),),
            tasks=("latency_512_1024", "latency_2048_4096"),
            metric="total_seconds",
            lower=True,
            relative=True,
            least=-5.0,
        ),
        elsewhere="python -m kvbench.bench (decode, d2o and h2o at 256 tokens)",
        note="H2O's 0.523 s per token at 2048+4096 is a slip for 0.0523: totals are compared",
    ),
    Claim(
        "d2o",
        "reasoning",
        "D2O consistently outperforms all other KV compression methods across all configurations",
        "5.2",
        "GSM8K, CoQA and TruthfulQA at 20% to 80% of the prompt, four Llama models",
        Unprinted("figure 5 is a picture without numbers"),
        trial=trial("lm_eval/gsm8k"),
    ),
    Claim(
        "d2o",
        "pg19",
        "achieve superior performance (lower perplexity) compared to other eviction-based compression methods",
        "5.3",
        "cumulative NLL on PG-19 with 2048 tokens kept",
        Unprinted("figure 6 is a picture without numbers"),
        trial=Trial((("d2o", "h2o"), ("d2o", "streamingllm")), "llama3_8b", "pg19", (2048,)),
    ),
)
