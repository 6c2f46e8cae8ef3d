"""The tables and figures of the papers as runs: protocols, estimates, and printed
beside measured numbers.

The papers' settings, methods, tables and figures are in `published`, and their printed numbers
in numbers.json.
"""
