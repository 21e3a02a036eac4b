"""Whether and how a Hugging Face model can be packed, asked of the model itself."""
