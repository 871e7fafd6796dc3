"""Commands for a pair before it is served: they convert it, and predict its gain by simulation, closed forms and
measurement.
"""
