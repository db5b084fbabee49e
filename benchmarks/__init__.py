"""Comparisons with TRL and diffusers, GPU measurements, and fault campaigns."""
