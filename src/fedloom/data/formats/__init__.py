"""Readers of files: one format each, from a path to tensors. Reading a file, whoever wrote it,
never runs its code.
"""
