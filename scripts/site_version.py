"""An mkdocs hook that adds the version to the site's name."""

import re
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1] / "src" / "pinstage" / "__init__.py"


def on_config(config: Any) -> Any:
    """Add the version to the name in the header and in titles."""
    (version,) = re.findall(r'^__version__ = "(.+)"$', PACKAGE.read_text(), re.MULTILINE)
    config.site_name = f"pinstage {version}"
    return config
