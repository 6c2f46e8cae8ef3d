"""Trackers report a run to other programs while it goes on: TensorBoard, MLflow, Weights & Biases,
or your own.
"""
