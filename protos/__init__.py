"""The wire format: `outrider/v1/*.proto`, and the Python code generated from it (`python -m protos.generate`)."""
