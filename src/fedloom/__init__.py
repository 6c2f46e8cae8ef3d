"""fedloom: federated learning on clients whose data differ."""
