"""Figures of the report, one module a kind; each draws a wide and a narrow layout."""
