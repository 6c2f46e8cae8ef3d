"""Serving: trained models in use, with the preprocessing that belongs to them."""
