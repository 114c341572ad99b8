"""Leaderboards: what an experiment asks, what a submission's samples show, and the page that ranks what holds."""
