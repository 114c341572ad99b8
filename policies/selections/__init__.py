"""How the ranking of a layer's tokens becomes the set that is kept, where that is not simply token by token."""
