"""Backends of a model: token ids in, token ids out."""
