"""The entry of each thread into a loop: on rows of its own, or with a team that meets at every step."""

from collections.abc import Iterable

from tensorloop.compiler.emitter.ir.code import Code


def _fields(first: int, **kinds: str) -> str:
    """Reads what lies in the job one behind the other, from a byte on."""
    lines = []
    for n, (name, kind) in enumerate(kinds.items()):
        lines.append(f"  %{name}.p = getelementptr i8, ptr %job, i64 {first + 8 * n}")
        lines.append(f"  %{name} = load {kind}, ptr %{name}.p, align 8")
    return "\n".join(lines)


APART = f"""define void @member(ptr %job) nounwind {{
entry:
{_fields(8, parts="i64", table="ptr", steps="i64", scratch="ptr", size="i64")}
  br label %claim
claim:
  %mine = atomicrmw add ptr %job, i64 1 seq_cst
  %left = icmp slt i64 %mine, %parts
  br i1 %left, label %work, label %done
work:
  %place = mul i64 %mine, 8
  %bounds = getelementptr i8, ptr %job, i64 48
  %low.p = getelementptr i8, ptr %bounds, i64 %place
  %low = load i64, ptr %low.p, align 8
  %high.p = getelementptr i8, ptr %low.p, i64 8
  %high = load i64, ptr %high.p, align 8
  %offset = mul i64 %mine, %size
  %own = getelementptr i8, ptr %scratch, i64 %offset
  call void @run(ptr %table, i64 %steps, i64 %low, i64 %high, ptr %own, i64 %mine)
  br label %claim
done:
  ret void
}}
"""
# Threads are counted when they are there: a team may be smaller than was asked for.
TOGETHER = f"""define void @member(ptr %job) nounwind {{
entry:
{_fields(136, number="ptr", count="ptr", table="ptr", steps="i64", scratch="ptr")}
  %mine = call i32 %number()
  %all = call i32 %count()
  %low = sext i32 %mine to i64
  %high = sext i32 %all to i64
  %part = ptrtoint ptr %job to i64
  call void @run(ptr %table, i64 %steps, i64 %low, i64 %high, ptr %scratch, i64 %part)
  ret void
}}
"""
# The last to arrive lets the others go on, by counting a turn. They look some microseconds for it, which is as long as
# a thread is late that has a core; then they leave their core to who has none.
WAIT = """define internal void @wait(i64 %part, i64 %count) nounwind noinline {{
entry:
  %alone = icmp slt i64 %count, 2
  br i1 %alone, label %done, label %arrive
arrive:
  %job = inttoptr i64 %part to ptr
  %turn.p = getelementptr i8, ptr %job, i64 64
  %turn = load atomic i64, ptr %turn.p acquire, align 8
  %before = atomicrmw add ptr %job, i64 1 acq_rel
  %arrived = add i64 %before, 1
  %last = icmp eq i64 %arrived, %count
  br i1 %last, label %open, label %look
open:
  store atomic i64 0, ptr %job monotonic, align 8
  %opened = atomicrmw add ptr %turn.p, i64 1 release
  br label %done
look:
  %looks = phi i64 [ 0, %arrive ], [ %more, %again ], [ 0, %leave ]
  %now = load atomic i64, ptr %turn.p acquire, align 8
  %over = icmp ne i64 %now, %turn
  br i1 %over, label %done, label %still
still:
  %more = add i64 %looks, 1
  %long = icmp sgt i64 %more, 2000
  br i1 %long, label %leave, label %again
again:
  {pause}
  br label %look
leave:
  %yield.p = getelementptr i8, ptr %job, i64 128
  %yield = load ptr, ptr %yield.p, align 8
  %ignored = call i32 %yield()
  br label %look
done:
  ret void
}}
"""
_X86 = "declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"
_ARM = "declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"


def wait_text(triple: str) -> list[str]:
    """The function that threads meet in."""
    declared, pause = _X86 if triple.startswith("x86_64") else _ARM
    return [declared, WAIT.format(pause=pause)]


def write_shares(code: Code, sizes: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[str, str]]:
    """Writes where the share of thread %low of %high begins and ends, for each (size, grain), in whole grains."""
    made = {}
    following = code.op("add i64 %low, 1", "i64").text
    # Thread n begins where n - 1 ends, as both come from one formula; the last one ends at the size itself.
    for size, grain in dict.fromkeys(sizes):
        ends = []
        for thread in ("%low", following):
            place = code.op(f"udiv i64 {code.times(thread, -(-size // grain))}, %high", "i64").text
            end = code.times(place, grain)
            if size % grain:
                fits = code.op(f"icmp slt i64 {end}, {size}", "i1").text
                end = code.op(f"select i1 {fits}, i64 {end}, i64 {size}", "i64").text
            ends.append(str(end))
        made[size, grain] = ends[0], ends[1]
    return made
