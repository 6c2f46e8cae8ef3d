"""What a run writes down on request, beside its figures: objectives, ALA's learning, trajectories, how alike models are."""
