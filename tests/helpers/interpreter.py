"""A faster interpreter of Triton. It has the same results."""

import dataclasses
import functools
import math


def make_faster() -> None:
    """Leave out what the interpreter computes for nothing, or again and again: more than half of the time of a launch.

    - It replaces the functions of `triton.language` by its own in every call of a device function, though after the
      first call of a launch nothing is left to replace.
    - It computes whether each integer operation overflows, for assertions that run with `debug` only.
    - It makes the shape of each tensor, and a table of all dtypes for each operation.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:  # no Triton for this system
        return
    if not hasattr(interpreter, "_patch_lang") or not hasattr(interpreter, "GridExecutor"):
        return  # another Triton, which does this in another way
    _replace_once(interpreter)
    builder = getattr(interpreter, "interpreter_builder", None)
    if builder is not None and not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _cache_dtypes(interpreter)
    _share_shapes(interpreter.tl.core)


def _replace_once(interpreter) -> None:
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules = (interpreter.tl, interpreter.tl.core)
    replaced: set[tuple[bool, ...]] = set()  # in this launch
    looked_at: set[int] = set()  # global variables, by their address

    class Nothing:
        def restore(self) -> None:
            pass

    def replace_once(function):
        if id(function.__globals__) in looked_at:
            return Nothing()
        looked_at.add(id(function.__globals__))
        visible = {id(x) for x in function.__globals__.values()}
        key = tuple(id(module) in visible for module in modules)
        if key in replaced:
            return Nothing()
        replaced.add(key)
        return replace(function)

    def forget() -> None:
        replaced.clear()
        looked_at.clear()

    @functools.wraps(launch)
    def launch_once(self, *args, **kwargs):
        forget()
        try:
            return launch(self, *args, **kwargs)
        finally:
            forget()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch_once


def _cache_dtypes(interpreter) -> None:
    core, look_up = interpreter.tl.core, interpreter._get_np_dtype
    cached = functools.cache(look_up)

    def get_np_dtype(dtype):
        scalar = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
        return cached(scalar) if type(scalar) is core.dtype else look_up(dtype)  # other types can't be keys

    interpreter._get_np_dtype = get_np_dtype


def _share_shapes(core) -> None:
    """Tensors of one shape share the objects that describe it."""
    base, make = core.tensor.__mro__[1], core.tensor.__init__

    @functools.cache
    def described(shape):
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(n) for n in shape])

    @functools.wraps(make)
    def make_tensor(self, handle, type):
        base.__init__(self)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = described(tuple(type.shape) if type.is_block() else ())

    core.tensor.__init__ = make_tensor
