"""griffe extension: an "Example:" section of a docstring is rendered as code, as griffe renders "Examples:"."""

import re

from griffe import Extension


class ExampleSections(Extension):
    def on_instance(self, *, obj, **_):
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
