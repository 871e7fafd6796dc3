"""The basis of all other packages: records, errors, ports and the mathematics of speculation.

Depends on the standard library and numpy alone: no Ray, no torch, no gRPC, no I/O.
"""
