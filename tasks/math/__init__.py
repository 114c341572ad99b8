"""AIME 2025 and MATH-500: the answer is the text in a box."""
