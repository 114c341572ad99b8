"""The files of a run on disk: samples, lock, metrics, and the definition of its sweep."""
