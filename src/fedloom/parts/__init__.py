"""Parts: what can happen around an algorithm at the fixed moments of a round."""
