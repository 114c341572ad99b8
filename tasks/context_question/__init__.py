"""Questions about long contexts, from files with a column for each."""
