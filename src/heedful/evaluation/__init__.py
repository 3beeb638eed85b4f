"""Metrics of outputs and of labels, losses, and log-probabilities of targets."""
