"""Hydra's plugins of kvbench. Hydra imports every module here at each start, so torch is imported inside functions."""
