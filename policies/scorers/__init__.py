"""Which tokens matter: one scorer per file."""
