"""From texts to batches. With this file the folder goes before any installed package of its name."""
