"""Predicting a run before it is paid for: bytes, speed, hours, money.

Everything here is arithmetic on a model's configuration and a machine's description: no weights
are loaded and torch is not imported. :mod:`headrace.plan.predict` puts the parts together.
"""
