"""The tables and figures of the papers as runs: protocols, estimates, and what the papers print
beside what is measured.

The papers' settings, methods, tables and figures are in `published`, and what they print in
numbers.json.
"""
