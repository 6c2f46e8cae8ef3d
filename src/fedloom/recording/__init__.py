"""Recorders: what a run writes down on request beside its figures, such as objectives, trajectories
and similarities.
"""
