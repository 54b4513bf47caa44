"""Measurements behind `deepinfer bench`: each a function that returns numbers and a table that prints them."""
