"""The tables and figures of the papers as runs: protocols, estimates, and what the papers print
beside what is measured.

The papers' settings, methods, tables and figures stand in a TOML file each (`paper_file` explains
it), what they print in numbers.json, and their data sets in datasets.toml.
"""
