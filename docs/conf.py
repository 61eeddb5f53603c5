"""Sphinx configuration. Builds need no network: no intersphinx."""

from importlib.metadata import version as installed_version

project = "meantime"
author = "The meantime authors"
copyright = "2026, The meantime authors"
release = version = installed_version("meantime")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"meantime {version}"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"  # no bare type where the text has no entry
napoleon_numpy_docstring = False
