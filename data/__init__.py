"""Preparing and loading data. With this file `import data` finds this folder before an installed package `data`."""
