"""Plots as SVG, and the HTML around them."""
