"""Where the sequences of a ragged batch begin and end, and how its tensors are packed and padded."""
