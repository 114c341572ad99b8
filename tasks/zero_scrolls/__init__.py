"""ZeroSCROLLS (Shaham et al. 2023, arXiv 2305.14196): ten tasks without public answers."""
