"""Bulk inference: files of any size through a model, in shards, by several processes or Ray."""
