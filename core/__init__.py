"""What every other part shares: records, errors, ports and the mathematics of speculation.

Knows the standard library and numpy, and nothing else: no Ray, no torch, no gRPC, no I/O.
"""
