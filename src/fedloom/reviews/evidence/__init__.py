"""Evidence that others can check: traces of two implementations side by side, and results in one
file that is run again.
"""
