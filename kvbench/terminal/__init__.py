"""What a user reads while it runs: sentences for errors, bars, the console."""
