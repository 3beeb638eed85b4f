"""Examples that come with heedful, loaded as any plugin is."""
