"""Trackers report a run in progress to other programs: TensorBoard, MLflow, Weights & Biases or
your own.
"""
