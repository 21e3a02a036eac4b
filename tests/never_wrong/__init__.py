"""What test_never_wrong.py is made of: entries, origins, changes and modes as tables, and how one combination runs."""
