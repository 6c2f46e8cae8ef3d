"""What a run writes down on request, beside its figures: objectives around local training, ALA's learning, trajectories."""
