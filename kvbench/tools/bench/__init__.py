"""The efficiency benchmark: what policies cost and save in seconds and bytes, set beside the papers' own tables."""
