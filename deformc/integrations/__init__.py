"""Adapters to other libraries. Each is imported by its own name and needs that library."""
