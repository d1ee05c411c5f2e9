"""Planted errors: see __main__.py."""
