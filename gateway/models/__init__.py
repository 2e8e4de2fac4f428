"""Which models are served, what stands for them, and who may use them; followed while requests run."""
