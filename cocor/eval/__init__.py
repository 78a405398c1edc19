"""What an encoder has learned: probes of its frozen features."""
