"""What finished runs are shown as: figures of runs (`summary`), tables, drawings and one
self-contained page (`page`).
"""
