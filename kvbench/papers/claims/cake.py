"""CAKE (Qin et al., ICLR 2025): layer budgets by preference and a mean + variance indicator. Tables 1 to 14."""

from dataclasses import replace

from kvbench.papers.claims.claim import Cell, Claim, Trial
from kvbench.papers.claims.printed import EACH, Compared, Computed, Falling, Unprinted, Versus, values
from kvbench.policies.allocators.pyramid import Pyramid

LONGBENCH = tuple(f"cake/table{number}" for number in (5, 6, 7, 8, 9))
RIVALS = ("streamingllm", "h2o", "tova", "snapkv", "pyramidkv")
BEST: tuple[Versus, ...] = (("cake", RIVALS),)
NEEDLES = ("cake/table10", "cake/table11", "cake/table12")
LONGEST = "latency_prompt130048_gen1024"
EVICT = "schedule=prompt decode=evict"
LAYERS, WINDOW, PROMPT = 32, 32, 8192


def subtasks(length: str) -> tuple[str, ...]:
    """NeedleBench's three at a length."""
    return tuple(
        f"needlebench_{length}_{kind}_overall" for kind in ("single_retrieval", "multi_retrieval", "multi_reasoning")
    )


def trial(
    task: str, budgets: tuple[int, ...], rivals: tuple[str, ...] = RIVALS, apart: bool = False, least: float = 0.0
) -> Trial:
    """CAKE against its rivals, all evicting while they decode, as in the paper."""
    pairs = tuple(("cake", rival) for rival in rivals)
    return Trial(pairs, "llama31_8b_instruct", task, budgets, EVICT, apart, least)


def pyramid_overspend() -> tuple[Cell, ...]:
    """By how many percent the released PyramidKV's whole-number slopes hold more than they are asked to."""
    cells = []
    for budget in (64, 128, 256, 512, 1024, 2048):
        total = budget * LAYERS
        held, exact = (
            sum(Pyramid(rounding=rounding).split(total, LAYERS, PROMPT, WINDOW)) for rounding in ("official", "webster")
        )
        above = WINDOW * LAYERS  # kept in every layer; the paper's budget is shared out beside it
        cells.append(
            Cell(
                f"budget {budget}: {held} slots against {exact} ({100 * (held / exact - 1):+.1f}%), beside the window",
                round(100 * (held - exact) / (exact - above), 6),
            )
        )
    return tuple(cells)


def decoding_speedup() -> tuple[Cell, ...]:
    """How many times as fast as the full cache a token is decoded after 130,048 tokens."""
    ms = values("cake/table13", metric="decode_ms_per_token", task=LONGEST)
    ratio = ms["full", LONGEST] / ms["cake", LONGEST]
    return (Cell(f"table13 {ms['full', LONGEST]} ms against {ms['cake', LONGEST]} ms: times", round(ratio, 6), 10.0),)


def flat_decoding() -> tuple[Cell, ...]:
    """CAKE's time per token at each length relative to that after 7,168 tokens, in percent."""
    ms = {
        task: value
        for (method, task), value in values("cake/table13", metric="decode_ms_per_token").items()
        if method == "cake"
    }
    first = ms["latency_prompt7168_gen1024"]
    return tuple(
        Cell(f"table13 {task}: {value} ms", round(100 * (value / first - 1), 6), -5.0, 5.0)
        for task, value in ms.items()
    )


CLAIMS = (
    Claim(
        "cake",
        "best-average",
        "consistently outperforms current baselines across various models and memory constraints",
        "abstract",
        "LongBench average against the best of five eviction methods, every model and budget",
        Compared(LONGBENCH, BEST),
        trial=trial("longbench", (128, 1024)),
    ),
    Claim(
        "cake",
        "best-task",
        "consistently outperforms across all task types in LongBench",
        "F.1",
        "each LongBench task against the best of the five, every model and budget",
        Compared(LONGBENCH, BEST, tasks=EACH),
        trial=trial("longbench", (128, 1024), apart=True),
    ),
    Claim(
        "cake",
        "top-two-llama2",
        "CAKE achieves top or second across each",
        "F.1",
        "table 5: each task at all six budgets, first or second of the six methods",
        Compared(("cake/table5",), BEST, tasks=EACH, rank=2, least=-1e-9),
    ),
    Claim(
        "cake",
        "top-two-llama2-128",
        "In the low memory scenario with the Llama2 model, CAKE leads or finishes second in all datasets",
        "5.2",
        "table 5 at 128: each task, first or second of the six methods",
        Compared(("cake/table5",), BEST, tasks=EACH, budgets=(128,), rank=2, least=-1e-9),
    ),
    Claim(
        "cake",
        "gain-falls",
        "especially in low-memory situations",
        "abstract",
        "gain in LongBench average over SnapKV from each budget to the next larger one",
        Falling(Compared(LONGBENCH[:3], (("cake", ("snapkv",)),))),
        trial=replace(trial("longbench", (64, 128, 256, 512, 1024, 2048), ("snapkv",)), falling=True),
    ),
    Claim(
        "cake",
        "near-lossless-1024",
        "CAKE achieves performance comparable to full cache models while only utilizing a small cache budget",
        "5.2",
        "LongBench average at 1024 within one point of the full cache",
        Compared(LONGBENCH, (("cake", ("full",)),), budgets=(1024,), least=-1.0),
        trial=trial("longbench", (1024,), ("full",), least=-0.01),
    ),
    Claim(
        "cake",
        "needle-best",
        "CAKE consistently outperforms other KV cache eviction methods across all evaluated tasks",
        "G",
        "NeedleBench's three sub-tasks against the best of H2O, SnapKV and PyramidKV",
        Compared(NEEDLES, (("cake", ("h2o", "snapkv", "pyramidkv")),), tasks=(*subtasks("32k"), *subtasks("8k"))),
        trial=trial("needlebench/32k", (256, 512, 1024), ("h2o", "snapkv", "pyramidkv")),
    ),
    Claim(
        "cake",
        "needle-overall",
        "CAKE shows superior overall performance",
        "5.3",
        "NeedleBench's overall score against the best of the three",
        Compared(
            NEEDLES,
            (("cake", ("h2o", "snapkv", "pyramidkv")),),
            tasks=("needlebench_32k_overall", "needlebench_8k_overall"),
        ),
    ),
    Claim(
        "cake",
        "preserving-at-3-percent",
        "preserving the performance of models when retaining only 3.2% KV cache",
        "abstract",
        "NeedleBench 32K at 1024: sub-tasks and overall within one point of the full cache",
        Compared(
            (NEEDLES[0], NEEDLES[2]),
            (("cake", ("full",)),),
            tasks=(*subtasks("32k"), "needlebench_32k_overall"),
            budgets=(1024,),
            least=-1.0,
        ),
    ),
    Claim(
        "cake",
        "single-beats-full",
        "surpass the performance achieved with the full cache",
        "5.3",
        "NeedleBench 32K single retrieval at 1024, CAKE and SnapKV against the full cache",
        Compared(NEEDLES[:1], (("cake", ("full",)), ("snapkv", ("full",))), tasks=subtasks("32k")[:1], budgets=(1024,)),
    ),
    Claim(
        "cake",
        "allocation-best",
        "Our allocation strategy consistently outperforms all baselines",
        "5.6",
        "table 2: the same indicator with uniform, pyramid, random and CAKE's layer budgets",
        Compared(
            ("cake/table2",),
            tuple(("cake", (f"cake_alloc_{other}",)) for other in ("uniform", "pyramid", "random")),
            metric="score",
        ),
        trial=trial("longbench", (128,), ("cake_alloc_uniform", "cake_alloc_pyramid", "cake_alloc_random")),
    ),
    Claim(
        "cake",
        "indicator-best",
        "the additive combination achieves the best performance overall",
        "5.6",
        "table 3: the same layer budgets with mean, variance, mean x variance and mean + variance",
        Compared(
            ("cake/table3",), tuple(("cake", (f"cake_ind_{other}",)) for other in ("mean", "var", "mean_times_var"))
        ),
        trial=trial("longbench", (128,), ("cake_ind_mean", "cake_ind_var", "cake_ind_mean_times_var")),
    ),
    Claim(
        "cake",
        "both-statistics",
        "entropy alone allocates barely better than uniform, with variance clearly (28.07, 28.14, 28.82)",
        "table 14",
        "P2A with the mean indicator less allocation by entropy alone: at least half a point",
        Compared(("cake/table14",), (("cake_ind_mean", ("cake_alloc_h_ind_mean",)),), least=0.5),
        ours=True,
        trial=Trial((("cake_ind_mean", "cake_alloc_h_ind_mean"),), "llama2_7b_chat", "longbench", (128,), least=0.005),
        note="the text gives 28.14 as the start without H and V; table 14 prints 28.07 there, and 28.14 with H alone",
    ),
    Claim(
        "cake",
        "p2a-elsewhere",
        "methods equipped with our allocation strategy consistently improve performance across nearly all tasks",
        "5.5",
        "H2O and SnapKV with uniform and with CAKE's layer budgets at 128 and 512",
        Unprinted("figure 8 is a picture without numbers"),
        says="most",
        trial=Trial(
            (("p2a_h2o", "h2o"), ("p2a_snapkv", "snapkv")), "llama2_7b_chat", "longbench", (128, 512), EVICT, apart=True
        ),
    ),
    Claim(
        "cake",
        "pyramid-not-better",
        "PyramidKV underperforms in many scenarios",
        "5.2",
        "LongBench average of SnapKV less PyramidKV's",
        Compared(LONGBENCH, (("snapkv", ("pyramidkv",)),)),
        says="most",
        trial=Trial((("snapkv", "pyramidkv"),), "llama31_8b_instruct", "longbench", (128, 1024)),
    ),
    Claim(
        "cake",
        "pyramid-overspends",
        "PyramidKV's whole-number slopes hold up to 15% more than the budget it is compared at",
        "methods/cake.md, 5",
        "slots of our allocator with rounding=official against exact, 32 layers, window 32, 8192 tokens; 14% at 128",
        Computed(pyramid_overspend, "% more than asked"),
        ours=True,
        note="at 64 the slope happens to divide; `policy.allocator.rounding=official` keeps the quirk for parity",
    ),
    Claim(
        "cake",
        "with-quantisation",
        "outperforming KIVI-INT2 (32.17) while using the same storage overhead",
        "E",
        "LongBench average of CAKE with KIVI at 4 bits less KIVI at 2 bits, both 12.5% of the bits",
        Compared(("cake/fig9_text",), (("cake_kivi_int4", ("kivi_int2",)),), budgets=(0.125,)),
        note="12.5% are nominal bits: scales, minima and the newest tokens kept exact are not counted",
    ),
    Claim(
        "cake",
        "tenfold-decoding",
        "over 10× speedup in decoding latency compared to the full cache approach",
        "5.4",
        "table 13: milliseconds per token after 130,048 tokens",
        Computed(decoding_speedup, "times"),
        elsewhere="python -m kvbench.bench (decode, full and cake, 128K tokens, on the paper's kind of GPU)",
    ),
    Claim(
        "cake",
        "flat-decoding",
        "maintaining consistent decoding speed across sequence lengths",
        "abstract",
        "table 13: milliseconds per token at each length within 5% of those after 7,168 tokens",
        Computed(flat_decoding, "%"),
        elsewhere="python -m kvbench.bench (decode, cake, 8K to 128K tokens)",
    ),
)
