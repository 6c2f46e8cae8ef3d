"""Checks methods with tiny instrumented rounds; their results must agree (`fedloom check`)."""
