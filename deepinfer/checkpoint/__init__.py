"""Reading checkpoints: the file format, the names, and the loading of a model from them."""
