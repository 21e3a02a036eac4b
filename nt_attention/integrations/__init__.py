"""Plugins for trainers: they patch the model and log how much padding was not computed. Import one by its library."""
