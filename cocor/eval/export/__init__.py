"""Write a trained encoder for other programs, check each file, say how to load it."""
