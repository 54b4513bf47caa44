"""Structured output: which tokens may come next so that the text has a given form. The automata are llguidance's.

Read in this order: `source.py` (a form as grammar text), `grammar.py` (a compiled grammar and a position in it), `compiler.py`
(compiled in the background, kept), `shortest.py` (how many tokens it takes at least), `fault.py` (where a form is malformed).
"""
