"""Use of trained models, with the preprocessing that belongs to them."""
