"""What works on this machine, what is missing, and the command that installs it.

Each module looks at one part and returns findings; :mod:`headrace.doctor.examine` joins them.
Nothing is changed, installed or sent.
"""
