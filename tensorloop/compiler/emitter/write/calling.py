"""The places in a step where torch does an operation.

The caller's status has the address of a function as its fourth word. It is called without arguments, does the next
one of the step's operations, and puts 1 into the fifth word if that went well. Else the loop ends at once, and no last
carry is written.
"""

from tensorloop.compiler.emitter.ir.code import Code


def read_entry(code: Code, status: str) -> tuple[str, str]:
    """Reads (the function's address, that of the word that says how it went)."""
    return code.op(f"load ptr, ptr {code.pointer(status, 24)}, align 8", "ptr").text, code.pointer(status, 32)


def write_call(code: Code, entry: str, went: str) -> None:
    """Writes a call of the next operation that torch does; the step goes on where all went well."""
    code.line(f"store i64 0, ptr {went}, align 8")
    code.line(f"call void {entry}()")
    word = code.op(f"load i64, ptr {went}, align 8", "i64").text
    good, following = code.op(f"icmp ne i64 {word}, 0", "i1"), code.name("called")[1:]
    code.line(f"br i1 {good.text}, label %{following}, label %stopped")
    code.label(following)


def write_end(code: Code, status: str) -> None:
    """Writes where a loop ends that was stopped: it says how many steps were done before."""
    code.line("ret void")
    code.label("stopped")
    code.line(f"store i64 %turn, ptr {status}, align 8")
