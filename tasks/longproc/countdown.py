"""The countdown problem: its depth-first search as text, and the official score of an answer.

Source: Ye et al. 2025, arXiv 2501.05414; princeton-pli/LongProc at 78e873a, longproc/countdown_evaluator.py. Equations
of the model are parsed, never evaluated as code.
"""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction

LARGEST = 2000
AROUND = 12  # line ends of a reference outside of its log
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


class RaisesError(ValueError):
    """The official scorer raises an error for this answer."""


def reference(numbers: Sequence[int], target: int) -> str | None:
    """The search log and the solution that it finds; None if the target cannot be reached."""
    log: list[str] = []
    steps = _search(list(numbers), target, 0, log)
    if steps is None:
        return None
    first, second, third = steps
    return (
        "# Search Procedure\n" + "".join(log) + "\n\nNow we have found the target, let's trace back the solution:\n"
        f"Final step: {third}\nThe step before: {second}\nThe first step: {first}\n\n"
        f"Output the solution in the required format:\n<Solution>\n{first}\n{second}\n{third}\n</Solution>\n"
    )


def _search(numbers: list[int], target: int, level: int, log: list[str]) -> list[str] | None:
    """The equations that reach the target from these numbers, pairs in the order of their places; adds to the log."""
    pairs = [(numbers[i], numbers[j]) for i in range(len(numbers)) for j in range(i + 1, len(numbers))]
    state = f"umber set: {numbers}, target: {target}"
    begin = "Initial n" if level == 0 else " Current n"
    if len(numbers) == 2:
        log.append(f"{begin}{state}, just two numbers left.")
    else:
        log.append(f"{begin}{state}. Options for choosing two numbers: {pairs}.")
        level += 1
    for one, two, rest in _choices(numbers):
        if len(numbers) > 2:
            picked = f"Pick two numbers ({one}, {two}) (numbers left: {rest})"
            log.append(f"\n{_indent(level)}{picked}. Try possible operations.")
        large, small = max(one, two), min(one, two)
        for sign in OPERATORS:
            found = _try(large, sign, small, rest, target, level + 1, log)
            if found is not None:
                return found
    return None


def _try(
    large: int, sign: str, small: int, rest: list[int], target: int, level: int, log: list[str]
) -> list[str] | None:
    """One operation: the equations to the target, or None; adds to the log."""
    line = f"\n{_indent(level)}Try {large} {sign} {small}"
    if sign == "/" and small == 0:
        log.append(f"{line} (invalid operation). drop this branch.")
        return None
    if sign == "/" and large % small:
        value = f"{large / small:.1f}"
        log.append(f"{line} = {value}. {value} is a decimal, drop this branch.")
        return None
    result = large // small if sign == "/" else int(OPERATORS[sign](large, small))
    equation = f"{large} {sign} {small} = {result}"
    if result >= LARGEST:
        log.append(f"{line} = {result}. {result} exceeds the maximum intermediate result, drop this branch.")
        return None
    if not rest:
        log.append(f"{line} = {result}. Evaluate {result} {'==' if result == target else '!='} {target}, ")
        log.append("target found!" if result == target else "drop this branch.")
        return [equation] if result == target else None
    log.append(f"{line} = {result}. Add {result} to the number set.")
    found = _search([result, *rest], target, level, log)
    return None if found is None else [equation, *found]


def _choices(numbers: list[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Every pair of numbers and the numbers that are left."""
    for i in range(len(numbers)):
        for j in range(i + 1, len(numbers)):
            yield numbers[i], numbers[j], [x for k, x in enumerate(numbers) if k not in (i, j)]


def _indent(level: int) -> str:
    return " " * level + "|- "


def draw(rng: random.Random, shortest: int, longest: int) -> tuple[list[int], int, str]:
    """Four numbers from 1 to 49, a target from 10 to 50, and their reference, whose log has this many lines."""
    while True:
        numbers, target = [rng.randint(1, 49) for _ in range(4)], rng.randint(10, 50)
        found = reference(numbers, target)
        if found is not None and shortest <= found.count("\n") - AROUND <= longest:
            return numbers, target, found


# --- scores ----------------------------------------------------------------------------------------------------------
def solves(numbers: Sequence[int], target: int, solution: str) -> bool:
    """Whether three equations use each number once and end in the target.

    Raises RaisesError where the official code does, which evaluates the left side of an equation as Python.
    """
    left, lines = list(numbers), solution.split("\n")
    if len(lines) != 3:
        return False
    for line in lines:
        parts = line.strip().split("=")
        if len(parts) != 2:
            return False
        value = _value(parts[0])
        sign = next((sign for sign in OPERATORS if sign in parts[0]), None)
        terms = parts[0].split(sign) if sign else []
        try:
            result = int(parts[1])
            if sign is None or len(terms) != 2 or value != result:
                return False
            for term in map(int, terms):
                left.remove(term)
        except ValueError:  # no whole number, or a number that is not left
            return False
        left.append(result)
    return left[0] == target


def _value(text: str) -> Fraction:
    """The value of an arithmetic expression of numbers. Raises RaisesError for any other text."""
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, MemoryError, RecursionError, OverflowError) as error:
        raise RaisesError(f"{text!r:.60} cannot be evaluated: {type(error).__name__}") from error


def _evaluate(node: ast.expr) -> Fraction:
    signs = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in signs:
        return Fraction(OPERATORS[signs[type(node.op)]](_evaluate(node.left), _evaluate(node.right)))
    raise SyntaxError(f"{type(node).__name__} is not arithmetic")


def followed(log: str, expected: str) -> float:
    """The share of the lines of a log that follow the reference, up to the first that does not.

    Picks must be equal; of a tried operation, the text before "=" and whether the branch is dropped. As in the official
    code the index of the last compared line is divided by the number of lines, so that a complete log has (n - 1)/n and
    one that ends after its first line -1/n.
    """
    (begins, *found), (first, *wanted) = log.strip().split("\n"), expected.strip().split("\n")
    if begins != first:
        return 0.0
    place = -1
    for line, right in zip(found, wanted, strict=False):
        place += 1
        if line == right:
            continue
        if "Pick two numbers" in right or not _same_try(line, right):
            break
    return place / len(wanted)


def _same_try(line: str, right: str) -> bool:
    dropped = "drop this branch" in line, "drop this branch" in right
    return line.split("=")[0] == right.split("=")[0] and dropped[0] == dropped[1]
