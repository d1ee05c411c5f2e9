"""What quantisation did: statistics of operands, observation of models, plots."""
