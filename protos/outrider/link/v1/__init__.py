"""Version 1: link.proto is the source, the other modules are generated from it."""
