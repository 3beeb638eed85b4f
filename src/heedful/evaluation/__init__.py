"""Metrics of what a model wrote, and how likely a text is to one."""
