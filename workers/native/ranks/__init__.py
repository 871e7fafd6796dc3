"""Rows that ranks of one machine exchange within a program."""
