import pytest

from kvbench.tasks.niah import Niah
from kvbench.tasks.ruler.frequent_words import FrequentWords
from kvbench.tasks.ruler.variable_tracking import VariableTracking
from kvbench.tasks.suite import TaskSuite
from kvbench.tasks.task import Tokenizer

SHORT = Niah(lengths=(200,), depths=(0.5,), repeats=1)
LONG = Niah(name="long", lengths=(300,), depths=(0.5,), repeats=3)


def test_tasks_take_turns_until_each_has_no_more(words: Tokenizer) -> None:
    suite = TaskSuite(name="both", chat=True, tasks={"short": SHORT, "long": LONG})
    told = [(example.index, example.metadata["task"]) for example in suite.examples(words, 0)]
    assert told == [(0, "short"), (1, "long"), (2, "long"), (3, "long")]


def test_an_output_is_scored_by_the_task_that_asked(words: Tokenizer) -> None:
    vt = VariableTracking(length=700)
    fwe = FrequentWords(length=700)
    suite = TaskSuite(name="both", chat=True, tasks={"vt": vt, "fwe": fwe})
    for example in suite.examples(words, 0, 4):
        first = example.references[0]
        assert suite.score(first, example) == pytest.approx(1 / {"vt": 5, "fwe": 3}[example.metadata["task"]])
