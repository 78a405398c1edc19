"""Monitor and show a run: health, profile, metrics, plots."""
