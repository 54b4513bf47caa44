"""Plain tensor functions: each the definition of one operation, float32 inside where the model says so.

They take tensors and numbers: no config, no module, no state.
"""
