"""How the kept tokens are held."""
