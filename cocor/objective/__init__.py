"""The paper's objective: MMNN, consistency loss and hyper-gradient."""
