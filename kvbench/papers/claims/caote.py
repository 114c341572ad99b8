"""CAOTE (arXiv 2504.14051): value-aware scores around H2O, TOVA and SnapKV. Tables 2 to 10."""

from dataclasses import replace

from kvbench.papers.claims.claim import Cell, Claim, Trial
from kvbench.papers.claims.printed import EACH, Compared, Computed, Falling, Unprinted, Versus, values

BASES = ("h2o", "tova", "snapkv")
LONGBENCH = ("caote/table2", "caote/table3", "caote/table7", "caote/table8")
PAIRS: tuple[Versus, ...] = tuple((f"{fast}caote_{base}", (base,)) for fast in ("", "fast") for base in BASES)
ALL = tuple(f"{wrapper}{base}" for wrapper in ("", "caote_", "fastcaote_") for base in BASES)
LLAMA = ("Llama-3.1-8B-Instruct", "Llama-3.2-3B-Instruct")
BLOCKS = "block=128 decode=evict"
RUN_AS = {"h2o": "h2o_norecent"}


def against_all(method: str) -> Versus:
    """The method against every other one of the paper's nine."""
    return method, tuple(other for other in ALL if other != method)


def trial(task: str, budgets: tuple[int, ...], apart: bool = False, bases: tuple[str, ...] = BASES) -> Trial:
    """CAOTE and FastCAOTE against their bases; H2O without a recent window, as the paper's results show it."""
    pairs = tuple((f"{fast}caote_{base}", RUN_AS.get(base, base)) for base in bases for fast in ("", "fast"))
    return Trial(pairs, "llama31_8b_instruct", task, budgets, BLOCKS, apart)


def smaller_blocks() -> tuple[Cell, ...]:
    """CAOTE with blocks of 32 tokens less CAOTE with blocks of 128, per base and task."""
    small, large = values("caote/table6_block32"), values("caote/table6_block128")
    both = [key for key in small if key in large and key[0].startswith("caote_")]
    return tuple(
        Cell(
            f"table6 {method} {task}: m=32 {small[method, task]}, m=128 {large[method, task]}:",
            round(small[method, task] - large[method, task], 6),
        )
        for method, task in both
    )


CLAIMS = (
    Claim(
        "caote",
        "always-average",
        "always improves accuracies on the downstream task",
        "abstract",
        "LongBench average with and without CAOTE or FastCAOTE, every model, budget and base",
        Compared(LONGBENCH, PAIRS),
        trial=trial("longbench", (2048, 4096)),
    ),
    Claim(
        "caote",
        "always-task",
        "still able to give boost in performance for all tasks",
        "appendix A",
        "each LongBench task with and without CAOTE or FastCAOTE",
        Compared(LONGBENCH, PAIRS, tasks=EACH),
        trial=trial("longbench", (2048, 4096), apart=True),
    ),
    Claim(
        "caote",
        "average-gain",
        "eviction methods equipped with CAOTE consistently deliver superior performance",
        "6",
        "mean gain over all tasks, models, budgets and bases",
        Compared(LONGBENCH, PAIRS, tasks=EACH),
        says="average",
        trial=trial("longbench", (2048, 4096)),
    ),
    Claim(
        "caote",
        "h2o-30-percent",
        "H2O shows > 30% improvement with CAOTE",
        "4.2",
        "LongBench average of H2O with CAOTE, relative to H2O alone, at 2k and 4k",
        Compared(LONGBENCH[:2], (("caote_h2o", ("h2o",)),), relative=True, least=30.0),
        trial=Trial(
            (("caote_h2o", "h2o_norecent"),), "llama31_8b_instruct", "longbench", (2048, 4096), BLOCKS, factor=1.3
        ),
        note="H2O sums over all queries without a recent window: fresh tokens compete on raw sums",
    ),
    Claim(
        "caote",
        "h2o-gain-falls",
        "CAOTE's gain on H2O shrinks as the budget grows (+16.42 at 2k, +7.66 at 8k on Llama-3.1-8B)",
        "tables 2, 7",
        "gain in LongBench average at 2k, 4k, 6k, 8k, step by step",
        Falling(Compared((LONGBENCH[0], LONGBENCH[2]), (("caote_h2o", ("h2o",)),), models=LLAMA[:1])),
        ours=True,
        trial=replace(trial("longbench", (2048, 4096, 6144, 8192), bases=("h2o",)), falling=True),
    ),
    Claim(
        "caote",
        "tova-gain-range",
        "on TOVA the gain stays between -0.2 and +1.0 points",
        "tables 2, 3, 7, 8",
        "LongBench average of TOVA with CAOTE less TOVA's",
        Compared(LONGBENCH, (("caote_tova", ("tova",)),), least=-0.2, most=1.0),
        ours=True,
    ),
    Claim(
        "caote",
        "snapkv-gain-range",
        "on SnapKV the gain stays between -0.15 and +1.6 points",
        "tables 2, 3, 7, 8",
        "LongBench average of SnapKV with CAOTE less SnapKV's",
        Compared(LONGBENCH, (("caote_snapkv", ("snapkv",)),), least=-0.15, most=1.6),
        ours=True,
    ),
    Claim(
        "caote",
        "fast-is-close",
        "FastCAOTE is within 0.8 points of CAOTE",
        "tables 2, 3, 7, 8",
        "LongBench average of FastCAOTE less CAOTE's, per base",
        Compared(LONGBENCH, tuple((f"fastcaote_{b}", (f"caote_{b}",)) for b in BASES), least=-0.8, most=0.8),
        ours=True,
        note="table 7 prints 48.58 for TOVA-FastCAOTE at 8k on Llama-3.1-8B, whose row has the mean 47.31",
    ),
    Claim(
        "caote",
        "best-on-llama",
        "the best performance is given by SnapKV-FastCAOTE for the Llama3 models",
        "4.2",
        "SnapKV-FastCAOTE's LongBench average against all others on both Llama models at 2k and 4k",
        Compared(LONGBENCH[:1], (against_all("fastcaote_snapkv"),)),
        trial=Trial(
            tuple(("fastcaote_snapkv", RUN_AS.get(other, other)) for other in ALL if other != "fastcaote_snapkv"),
            "llama31_8b_instruct",
            "longbench",
            (2048, 4096),
            BLOCKS,
        ),
    ),
    Claim(
        "caote",
        "best-on-qwen",
        "for Qwen 2.5 models SnapKV-CAOTE performs the best",
        "4.2",
        "SnapKV-CAOTE's LongBench average against all others on both Qwen2.5 models at 2k and 4k",
        Compared(LONGBENCH[1:2], (against_all("caote_snapkv"),)),
    ),
    Claim(
        "caote",
        "needle-gain",
        "CAOTE improves the state-of-the-art eviction method",
        "4.4",
        "needle accuracy with and without CAOTE or FastCAOTE, Llama models",
        Compared(("caote/table5",), PAIRS, tasks=("niah",), measure="accuracy"),
        trial=trial("niah", (2048, 4096, 6144)),
    ),
    Claim(
        "caote",
        "needle-best-3b",
        "H2O-FastCAOTE performs best for all budgets with Llama 3.2-3B",
        "4.4",
        "needle accuracy against the other eight at 2k, 4k, 6k, 8k",
        Compared(
            ("caote/table5",), (against_all("fastcaote_h2o"),), tasks=("niah",), models=LLAMA[1:], measure="accuracy"
        ),
    ),
    Claim(
        "caote",
        "needle-best-8b",
        "H2O-CAOTE performs best for Llama 3.1-8B with budget = {2k, 6k}",
        "4.4",
        "needle accuracy against the other eight at 2k and 6k",
        Compared(
            ("caote/table5",),
            (against_all("caote_h2o"),),
            tasks=("niah",),
            models=LLAMA[:1],
            budgets=(2048, 6144),
            measure="accuracy",
        ),
    ),
    Claim(
        "caote",
        "needle-qwen",
        "using CAOTE, all methods achieve improved accurracy",
        "C.3",
        "needle accuracy with and without CAOTE or FastCAOTE at 6k, Qwen2.5",
        Compared(("caote/table10",), PAIRS, tasks=("niah",), measure="accuracy"),
    ),
    Claim(
        "caote",
        "booksum-qwen",
        "using CAOTE, all methods achieve improved perplexity",
        "C.2",
        "Booksum perplexity gap with and without CAOTE or FastCAOTE at 2k, Qwen2.5",
        Compared(
            ("caote/table9",), PAIRS, tasks=("booksum",), metric="perplexity_delta", lower=True, measure="perplexity"
        ),
        trial=Trial(trial("", ()).pairs, "qwen25_7b_instruct", "booksum", (2048,), BLOCKS),
    ),
    Claim(
        "caote",
        "booksum-llama",
        "the perplexity either improves or surpasses the perplexity of the baseline model",
        "4.3",
        "Booksum perplexity gap with and without CAOTE on both Llama models",
        Unprinted("the body of table 4 is lost in the text of the paper"),
        trial=trial("booksum", (2048, 4096, 6144)),
    ),
    Claim(
        "caote",
        "smaller-blocks",
        "the smaller the block-size the better CAOTE would perform",
        "4.5",
        "table 6, CAOTE at m = 32 less CAOTE at m = 128, per base and task",
        Computed(smaller_blocks, "points"),
        elsewhere="python -m kvbench -m model=llama32_3b_instruct task=longbench "
        "policy=caote_h2o,caote_tova,caote_snapkv budget=4096 block=32,128 decode=evict",
    ),
    Claim(
        "caote",
        "output-error",
        "We observe that the CAOTE variant always produces a smaller",
        "4.5",
        "error of attention outputs per layer with and without CAOTE",
        Unprinted("figure 3 is a picture without numbers"),
        elsewhere="python -m kvbench.diagnose output_error policy=snapkv,caote_snapkv,tova,caote_tova budget=128",
    ),
    Claim(
        "caote",
        "h2o-passes-sinks",
        "with CAOTE, H2O passes plain attention sinks at 6k",
        "tables 7, 8",
        "LongBench average of H2O-CAOTE less that of StreamingLLM at 6k",
        Compared(LONGBENCH[2:], (("caote_h2o", ("streamingllm",)),), budgets=(6144,)),
        ours=True,
        trial=Trial((("caote_h2o", "streamingllm"),), "llama31_8b_instruct", "longbench", (6144,), BLOCKS),
    ),
)
