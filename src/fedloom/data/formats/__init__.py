"""Readers of files: one format each, from a path to tensors. Reading a file of any author
never runs its code.
"""
