"""AIME 2025 and MATH-500 as kvpress scores them: the text in the box is the answer, or it is not."""
