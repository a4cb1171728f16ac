"""The CPU engine: transformers generate() behind an OpenAI-compatible server."""
