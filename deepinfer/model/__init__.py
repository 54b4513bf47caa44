"""The model, in the order a reader needs it: transformer, block, attention, moe; then the parts they are made of."""
