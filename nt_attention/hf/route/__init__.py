"""What transformers calls by name: the attention function and the mask function, and what they know of a call."""
