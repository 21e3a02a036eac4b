"""A faster interpreter of Triton. It has the same results."""

import functools


def make_faster() -> None:
    """Let the interpreter replace the functions of `triton.language` by its own once in a launch.

    It does so in every call of a device function, though after the first call nothing is left to replace. That is a
    third of the time of a launch.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:  # no Triton for this system
        return
    if not hasattr(interpreter, "_patch_lang") or not hasattr(interpreter, "GridExecutor"):
        return  # another Triton, which does this in another way
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules = (interpreter.tl, interpreter.tl.core)
    replaced: set[tuple[int, ...]] = set()  # in this launch

    class Nothing:
        def restore(self) -> None:
            pass

    def replace_once(function):
        visible = {id(x) for x in function.__globals__.values()}
        key = tuple(id(module) in visible for module in modules)
        if key in replaced:
            return Nothing()
        replaced.add(key)
        return replace(function)

    @functools.wraps(launch)
    def launch_once(self, *args, **kwargs):
        replaced.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            replaced.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch_once
