"""The contrastive methods that CoCor extends: one small ``nn.Module`` each."""
