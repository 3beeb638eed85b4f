"""Example plugins that are included in heedful."""
