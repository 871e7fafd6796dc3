"""Attention in native code: rows over keys and values in their slots (`rows`), in LLVM instructions (`reads`)."""
