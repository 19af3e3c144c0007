"""Hooks on modules that hand what they see to a sink."""
