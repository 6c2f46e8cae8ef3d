"""Reviews of results and methods: the papers' tables, bundles that are run again, and the
checker.
"""
