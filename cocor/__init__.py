"""CoCor: contrastive learning with consistent representations (TMLR 2024), made fast and trustworthy."""

__version__ = "0.1.0"
