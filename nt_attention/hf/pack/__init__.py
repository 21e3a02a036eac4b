"""The call of a Hugging Face model as one packed row."""
