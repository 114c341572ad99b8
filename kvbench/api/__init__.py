"""What a program or a notebook calls: evaluate, generate, and the results of both this process and earlier ones."""
