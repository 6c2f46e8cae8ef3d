"""The tables and figures of the papers as runs: protocols, estimates, and what the papers print beside what is measured.

fedmr.toml, fedumf.toml, fedala.toml, mcmahan.toml, niid-bench.toml   the papers' settings, methods, tables and figures
numbers.json    what they print
datasets.toml   their data sets
protocols       settings, measures and cells
paper_file      the papers' files, and all tables and figures by name
paper_data      which data they need and whether these are at hand
plan            what a user wants of a table or figure, and the runs that it takes
estimate        how long these will take here
measure         a cell's value from finished runs
result_table    paper and measurement, on the terminal, as CSV and as Markdown
execute         the data and the files
"""
