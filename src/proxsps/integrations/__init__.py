"""Integrations with trainers of other packages. Each module needs its framework."""
