"""Configuration of a run: options, parsing, defaults and checks."""
