"""The tables and figures of the five papers as runs: protocols, estimates, and what the papers print beside what is measured.

protocols       what a setting is, and its configuration
fedmr, fedumf, fedala   the papers' settings, methods, tables and figures
catalogue       all of them by name
needs           which data they need and whether these are at hand
request         what a user asks for: rows, columns, and less than the whole
estimate        how long it will take here
measure         a cell's value out of finished runs
side_by_side    paper and measurement, on the terminal, as CSV and as Markdown
execute         the runs and the files
"""
