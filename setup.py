"""Makes the long description out of README.md; everything else about the package is in setup.cfg."""

import pathlib
import re

import setuptools

README = pathlib.Path(__file__).with_name("README.md").read_text(encoding="utf-8")
# A package index has no files beside the page: of a link to a file of the repository, the text stays.
LINK_TO_FILE = re.compile(r"\[([^]]+)\]\((?!https?://|#)[^)]+\)")

setuptools.setup(
    long_description=LINK_TO_FILE.sub(r"\1", README),
    long_description_content_type="text/markdown",
)
