"""Version 1: generation.proto is the source, the other modules are generated from it."""
