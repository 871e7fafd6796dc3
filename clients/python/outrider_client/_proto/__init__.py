"""Generated from the project's .proto files by `python -m protos.generate`; not part of the interface."""
