"""Recorders: optional records of a run, such as objectives, trajectories and similarities."""
