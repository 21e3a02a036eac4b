"""Packed calls of `nn.Transformer`, its encoder and decoder, and of `nn.MultiheadAttention`."""
