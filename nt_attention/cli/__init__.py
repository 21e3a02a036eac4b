"""The commands of ``python -m nt_attention``: a module each, with ``main(options)``, which returns the exit status."""
