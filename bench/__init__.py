"""What is measured, and how: programs that print ratios with their settings and write them as JSON."""
