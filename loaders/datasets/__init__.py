"""Data sets: folders, label files, .beton files and their size index."""
