"""Backends built from a saved model: converted, proved against the net, timed and chosen."""
