"""griffe extension: the docstrings and signatures of the reference pages.

- An "Example:" section of a docstring is rendered as code, as griffe renders "Examples:".
- `**options: Unpack[Options]` in a signature is replaced by the options, as `help` shows them.
- `**unknown: Never`, which is only there for its error, is left out.
"""

import re

from griffe import Extension, Parameter, ParameterKind


class ExampleSections(Extension):
    def on_instance(self, *, obj, **_):
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)

    def on_function_instance(self, *, func, **_):
        for parameter in list(func.parameters):
            if str(parameter.annotation) == "Never":
                del func.parameters[parameter.name]

    def on_package(self, *, pkg, **_):
        if pkg.name == "nt_attention":
            options = list(options_of(pkg["kernels.call"]))
            for function in (pkg["functional.varlen_attention"], pkg["functional.explain"]):
                *positional, rest = function.parameters
                del function.parameters[rest.name]
                named = [function.parameters[each.name] for each in positional if each.kind.value == "keyword-only"]
                for parameter in named:
                    del function.parameters[parameter.name]
                for parameter in (*options, *named):
                    function.parameters.add(parameter)


def options_of(file):
    for name, option in file["Options"].attributes.items():
        declared = re.match(r"_option\((.+?), _", str(file["AttentionSpec"][name].value))
        default = declared[1] if declared else "None"  # of scale
        yield Parameter(name, annotation=option.annotation, kind=ParameterKind.keyword_only, default=default)
