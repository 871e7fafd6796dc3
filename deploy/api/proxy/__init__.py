"""Admission in the process of a Serve proxy: counts calls (`admission`) by the orchestrators' limits (`places`)."""
