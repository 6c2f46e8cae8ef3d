"""Trackers: what tells other programs (TensorBoard, MLflow, Weights & Biases, your own) of a run
while it goes on.
"""
