"""What is watched and shown of a run: health, profile, metrics, plots."""
