"""Servers of others, started with ktk switched on.

`engines` knows which there are, what each needs, and the command that starts it; `transformers` is
what runs inside of transformers' own.
"""
