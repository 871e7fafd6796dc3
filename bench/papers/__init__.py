"""The tables of published papers, measured for the demo pair and on simulated hardware."""
