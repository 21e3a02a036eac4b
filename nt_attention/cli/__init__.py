"""What ``python -m nt_attention`` can do, a module each. None of it is imported by ``import nt_attention``.

A command's module has ``add_arguments(parser)``, and ``main(options)``, which returns the exit status.
"""
