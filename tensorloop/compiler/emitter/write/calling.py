"""The places in a step where torch does an operation.

The caller's status has the address of a function as its fourth word. It is called without arguments, does the next
one of the step's operations, and gives 0 where that failed: then the loop ends at once, and no last carry is written.
"""

from tensorloop.compiler.emitter.ir.code import Code


def read_entry(code: Code, status: str) -> str:
    """The function's address."""
    return code.op(f"load ptr, ptr {code.pointer(status, 24)}, align 8", "ptr").text


def write_call(code: Code, entry: str) -> None:
    """Calls it, and goes on where all went well."""
    made = code.op(f"call i32 {entry}()", "i32").text
    good, following = code.op(f"icmp ne i32 {made}, 0", "i1"), code.name("called")[1:]
    code.line(f"br i1 {good.text}, label %{following}, label %stopped")
    code.label(following)


def write_end(code: Code, status: str) -> None:
    """Where a loop ends that was stopped: it says how many steps were done before."""
    code.line("ret void")
    code.label("stopped")
    code.line(f"store i64 %turn, ptr {status}, align 8")
