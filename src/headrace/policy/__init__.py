"""Placement: what a step needs, how long it takes, and which settings make it shortest."""
