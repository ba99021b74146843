"""Divides a model, its optimizer state and its sequences over processes."""
