"""The HTTP server of `heedful serve`: models behind LibreTranslate's and OpenAI's routes."""
