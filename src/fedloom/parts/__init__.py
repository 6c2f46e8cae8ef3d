"""Parts: components that act around an algorithm at fixed moments of a round."""
