"""Fine-tune an encoder as a detector, and measure average precision."""
