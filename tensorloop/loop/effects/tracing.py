"""Tracing on Python 3.11 that goes on after an error.

`sys.settrace` takes a trace function away as soon as it raises. An error with which an effect is refused may be caught
by the body, by a bare `except` or where a finalizer runs, and what comes after it is to be refused, too. So the
function is handed to the interpreter by a few instructions of our own, which do as CPython's and leave it there.
"""

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

from tensorloop.loop.effects.operands import stack_is_known

_held: list[Any] = []
_EVENTS = ["call", "exception", "opcode", "line"]
_TRACE_AT = 32  # byte of `f_trace` in a PyFrameObject of CPython 3.11
# Calls `self` where a frame begins (0), and the function in `f_trace`, if any, for an exception (1), a line (2) and an
# opcode (7).
_TEXT = """
define i32 @traced(ptr %self, ptr %frame, i32 %what, ptr %arg) {
  %place = getelementptr i8, ptr %frame, i64 TRACE
  %local = load ptr, ptr %place
  switch i32 %what, label %none [i32 0, label %call i32 1, label %inside i32 2, label %inside i32 7, label %inside]
inside:
  %empty = icmp eq ptr %local, null
  br i1 %empty, label %none, label %call
call:
  %f = phi ptr [%self, %0], [%local, %inside]
  %one = icmp eq i32 %what, 1
  %inner = select i1 %one, ptr inttoptr (i64 NAME1 to ptr), ptr inttoptr (i64 NAME2 to ptr)
  %line = icmp eq i32 %what, 2
  %other = select i1 %line, ptr inttoptr (i64 NAME3 to ptr), ptr %inner
  %begins = icmp eq i32 %what, 0
  %event = select i1 %begins, ptr inttoptr (i64 NAME0 to ptr), ptr %other
  %out = call ptr (ptr, ...) inttoptr (i64 CALL to ptr)(ptr %f, ptr %frame, ptr %event, ptr %arg, ptr null)
  call void inttoptr (i64 DROP to ptr)(ptr %out)
  %failed = icmp eq ptr %out, null
  %result = sext i1 %failed to i32
  ret i32 %result
none:
  ret i32 0
}
"""


@functools.cache
def tracer(function: Any) -> Callable[[], None]:
    """Returns a function that sets a trace function: for good if the interpreter is known, else like `sys.settrace`."""
    try:
        from llvmlite import binding
    except ImportError:
        return functools.partial(sys.settrace, function)
    if not stack_is_known:  # nor then where a frame has its trace function
        return functools.partial(sys.settrace, function)
    text, api = _TEXT, ctypes.pythonapi
    numbers = {"TRACE": _TRACE_AT} | {f"NAME{k}": id(x) for k, x in enumerate(_EVENTS)}
    for name, called in {"CALL": api.PyObject_CallFunctionObjArgs, "DROP": api.Py_DecRef}.items():
        numbers[name] = ctypes.cast(called, ctypes.c_void_p).value or 0
    for name, number in numbers.items():
        text = text.replace(name, str(number))
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(text), machine)
    engine.finalize_object()
    _held.append(engine)
    set_trace = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.py_object)(("PyEval_SetTrace", api))
    return functools.partial(set_trace, engine.get_function_address("traced"), function)
