"""One module an engine: configuration to command, and what its server says."""
