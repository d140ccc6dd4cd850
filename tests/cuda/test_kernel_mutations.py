"""What kernel_battery.py runs notices every line of the kernels that is broken here. (test_p2p_protocol.py breaks what
orders ranks: that takes ThreadSanitizer.)"""

import pytest

import host_kernels
from c10d_custom.transport.cuda import compiler
from kernel_battery import PAIRS
from mutants import mutants

pytestmark = pytest.mark.full("compiles and runs the kernels anew for each line")

# The file, a piece of it that is there once, what takes its place.
REDUCE = {
    "the first job for all": ("a.job[blockIdx.x % a.jobs]", "a.job[0]"),
    "blocks of other jobs count": ("index = blockIdx.x / a.jobs", "index = blockIdx.x"),
    "more threads than a job has": ("blocks = gridDim.x / a.jobs", "blocks = gridDim.x"),
    "sources of the first job": ("u8* const* const source = a.place + job.first", "u8* const* const source = a.place"),
    "targets of the first job": ("target = a.place + job.first + job.sources", "target = a.place + job.sources"),
    "targets where sources are": ("target = a.place + job.first + job.sources", "target = a.place + job.first"),
    "the first factor for all": ("return a.factor[j]", "return a.factor[j * 0]"),
    "the skew is not length": ("end = job.skew + job.bytes", "end = job.bytes"),
    "no part at the end": ("vectors = (end + 15) / 16", "vectors = end / 16"),
    "no part in front": ("first = job.skew != 0", "first = 0"),
    "all is aligned": ("job.unit == 16 && end / 16 > first", "end / 16 > first"),
    "one Vector too many": ("? end / 16 : first;", "? end / 16 + 1 : first;"),
    "each is done twice": ("v += kVectors * threads", "v += threads"),
    "some are left out": ("v += kVectors * threads", "v += 2 * kVectors * threads"),
    "targets past the end": ("if (i == 0 || v + i * threads < last) store", "if (i <= 1) store"),
    "the source's skew": ("load_vector(source[j] - job.skew", "load_vector(source[j]"),
    "the target's skew": ("store_vector(target[t] - job.skew", "store_vector(target[t]"),
    "one source for all": ("load_vector(source[j]", "load_vector(source[0 * j]"),
    "the parts in one place": ("k < first ? k : last + (k - first)", "k"),
    "bytes before the first": ("low = v == 0 ? job.skew : 0", "low = 0"),
    "bytes past the last": ("high = end - 16 * v < 16 ? (u32)(end - 16 * v) : 16", "high = 16"),
    "no parts": ("k < first + (vectors - last)", "k < first"),
    "one thread's parts only": ("k += threads", "k += vectors"),
    "one part in all targets": ("scatter_vector(target[t]", "scatter_vector(target[0 * t]"),
}
VECTORS = {
    "parts written as if aligned": ("if (unit == 1 || low != 0 || high != 16) {", "if (unit == 1) {"),
    "the low byte only": ("(p + 4 * w + b) << (8 * b)", "(p + 4 * w + b) << 0 * b"),
    "written low bytes only": ("(v.word[w] >> (8 * b))", "(v.word[w] >> 0 * b)"),
    "a byte too few": ("4 * w + b >= low &&", "4 * w + b > low &&"),
    "past the end": ("4 * w + b >= low && 4 * w + b < high", "4 * w + b >= low"),
    "by twos what is aligned to a byte": ("if (unit == 1 || low", "if (low"),
    "no more than a batch": ("first < sources; first += kBatch", "first < kBatch; first += kBatch"),
    "sources past the last": ("if (first + k >= sources) break;", ""),
    "folded before it is set": ("if (first + k == 0) {", "if (k == 0) {"),
    "not scaled": ("item[i] *= scale", "item[i] *= 1"),
    "not finished": ("R::Operation::template finish<kItems>(acc, sources);", ""),
    "one Vector's items": ("vectors[i] = R::Format::store(acc + i * kEach)", "vectors[i] = R::Format::store(acc)"),
}
P2P = {
    "it does not hear of a failure": (
        "if (failed != 0) report(kPeer, (u32)failed);\n    return failed != 0;",
        "(void)failed;\n    return false;",
    ),
    "the wrong rank failed": ("report(kPeer, (u32)failed)", "report(kPeer, a_.rank)"),
    "nobody is told of a failure": (
        "store_relaxed_system(&a_.pad[rank]->failed, (u64)kind << 32 | a_.rank)",
        "(void)rank",
    ),
    "only the first is told": (
        "rank < a_.ranks; ++rank) {\n        if ((gone",
        "rank < 1; ++rank) {\n        if ((gone",
    ),
    "who is gone is told": ("if ((gone >> rank & 1) == 0) store", "store"),
    "who is gone is another": ("(gone >> rank & 1) == 0", "(gone >> rank & 2) == 0"),
    "the host is not told": (
        "store_release_system(&a_.record->failure",
        "if (kind == 0) store_release_system(&a_.record->failure",
    ),
    "the peer is not named": ("(u64)peer << 48", "(u64)(peer & 0) << 48"),
    "the kind is not told": ("(u64)kind << 56", "(u64)kMismatch << 56"),
    "the number is not told": ("(u64)peer << 48 | a_.number", "(u64)peer << 48"),
    "every block tells": ("if (add_acquire_release(&own_.reported, 1) != 0) return false;", ""),
    "no deadline": ("now - begun_ <= a_.timeout_ns", "now >= begun_"),
    "a deadline at once": ("now - begun_ <= a_.timeout_ns", "now < begun_"),
    "the host is not heard": ("a_.record->abort) != 0", "a_.record->abort) == 77"),
    "any call will do": (".flag) == expected()) return true;", ".flag) >> 32 == barriers_) return true;"),
    "another call is awaited": ("if (calls_another(rank) || told()) return false;", "if (told()) return false;"),
    "words of one for all": ("words(a_.rank, rank, number_)", "words(a_.rank, rank * 0, number_)"),
    "a word twice": ("(u32)low[1], (u32)high[0]", "(u32)low[0], (u32)high[0]"),
    "words are sent to one": ("words(after(k), a_.rank, number_)", "words(after(1), a_.rank, number_)"),
    "a group that has failed goes on": ("whole = !told();", "whole = true;"),
    "another call is not seen": ("other = owner != 0 && owner != a_.token;", "other = owner == 1 << 31;"),
    "another call is not told of": ("give_up(kAtOnce, a_.rank)", "told()"),
    "every block is another call": ("owner != 0 && owner != a_.token", "owner != 0"),
    "the pad stays taken": ("store_release(&own_.owner, 0);", ""),
    "calls are not counted": ("own_.calls = number_ + 1;", "own_.calls = number_;"),
    "barriers are not counted": ("own_.barriers = barriers_;", ""),
    "blocks stay through": ("own_.through = 0;", ""),
    "the factor of the first": ("return signal_[rank].factor", "return signal_[rank * 0].factor"),
    "the last part is whole": (
        "return bytes - offset < 16 ? (u32)(bytes - offset) : 16;",
        "return bytes != offset ? 16 : 0;",
    ),
    "inputs are aligned": ("return a.unit == 16 && size == 16 ? load", "return size == 16 ? load"),
    "outputs are aligned": ("if (a.unit == 16 && size == 16) {", "if (size == 16) {"),
    "the own staging for all": ("from = call.staging(j) + start", "from = call.staging(a.rank + 0 * j) + start"),
    "no share of its own": ("own = slice_of(a.rank, a.output", "own = slice_of(0 * a.rank, a.output"),
    "its share stays in staging": ("write(a, own.to, at, own.bytes, v);", ""),
    "its share is not staged": ("if (call.stages()) store_vector(staging + a.rank * a.slice + at, v);", ""),
    "a share is not taken": ("a.ranks - 1, a.slice", "a.ranks - 2, a.slice"),
    "ranks past the last": (
        "return a_.rank + k < a_.ranks ? a_.rank + k : a_.rank + k - a_.ranks",
        "return (a_.rank + k) / a_.ranks",
    ),
    "past the end of the data": ("left < a.slice ? left : a.slice", "a.slice"),
    "shares past the end": ("start < a.bytes ? a.bytes - start : 0", "a.bytes - start"),
    "whole Vectors past the end": ("at + 16 <= copy.bytes ? copy.to", "at < copy.bytes ? copy.to"),
    "many at once in one place": ("copy.to + at : nullptr", "copy.to : nullptr"),
    "many at once of one copy": ("if (++k == copies) k = 0, at", "if (++k > 0) k = 0, at"),
    "the rest is left out": ("for (; at < copy.bytes; at += call", "for (; at + call.step < copy.bytes; at += call"),
    "parts of Vectors are left out": ("call.owns(copy.bytes) ?", "call.first > copy.bytes ?"),
    "another's part of a Vector": ("% (u32)(step / 16) == (u32)(first / 16)", "% (u32)(step / 16) > (u32)(first / 16)"),
    "folded past the end": ("both = kVectors == 2 && at + call.step < bytes", "both = kVectors == 2"),
    "every other is not folded": ("at += kVectors * call.step", "at += 2 * kVectors * call.step"),
    "each is folded twice": ("at += kVectors * call.step", "at += call.step"),
    "what lies is staged past its end": ("if (call.stages()) store_vector", "store_vector"),
    "which calls have ended is not told": ("store_relaxed_system(&a_.record->ended, (u64)number_ + 1);", ""),
    "one call fewer has ended": ("(u64)number_ + 1);", "(u64)number_);"),
    "all_gather: all in one place": ("Copy{a.part[rank], call", "Copy{a.part[rank * 0], call"),
    "all_gather: what one gave": ("call.staging(rank), a.part", "call.staging(rank * 0), a.part"),
    "all_gather: without its own": (
        "move<false>(a, call, a.ranks, a.bytes",
        "move<false>(a, call, a.ranks - 1, a.bytes",
    ),
    "reduce_scatter: inputs in one place": ("staging + k * a.slice", "staging + k * 0"),
    "reduce_scatter: one input for all": ("a.part[k], a.bytes", "a.part[k * 0], a.bytes"),
    "reduce_scatter: another's part": ("call, a.rank * a.slice)", "call, (a.ranks - 1 - a.rank) * a.slice)"),
    "broadcast: the first is the root": ("call.staging(a.root), a.bytes", "call.staging(a.root * 0), a.bytes"),
    "broadcast: the root takes, too": ("copies = a.rank != a.root", "copies = 1"),
    "broadcast: the root gives nothing": ("if (a.rank == a.root) put", "if (a.rank > a.root) put"),
}
MUTATIONS = [
    (file, name) for file, named in (("reduce.h", REDUCE), ("vectors.h", VECTORS), ("p2p.h", P2P)) for name in named
]
BROKEN = {"reduce.h": REDUCE, "vectors.h": VECTORS, "p2p.h": P2P}
# The part of the battery that is for a file, and the kernels that it runs.
PARTS = {
    "reduce.h": ("reduced", ["Reduce"]),
    "vectors.h": ("reduced", ["Reduce"]),
    "p2p.h": ("fused", host_kernels.FUSED),
}


SECONDS = 100


def noticed(battery, tmp_path, file, *files):
    """How the kernels were found to be broken, with these files in place of those of the same name; None: they were
    not."""
    # A GPU does not load what is not aligned; the host does, unless it is watched.
    watched = "-fsanitize=alignment", "-fno-sanitize-recover=all", "-Wno-error"
    part, algorithms = PARTS[file]
    host_kernels.build(tmp_path / "kernels.so", algorithms, PAIRS, files, watched)
    return battery.noticed(SECONDS, str(tmp_path / "kernels.so"), part)


@pytest.fixture(scope="module")
def battery():
    with mutants("kernel_battery") as made:
        yield made


@pytest.fixture(scope="module")
def as_they_are(battery, tmp_path_factory):
    return [noticed(battery, tmp_path_factory.mktemp("kernels"), file) for file in ("reduce.h", "p2p.h")]


@pytest.mark.timeout(300)
def test_what_is_left_as_it_is_passes(as_they_are):
    assert as_they_are == [None, None]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("file, name", MUTATIONS, ids=lambda v: v.replace(" ", "_"))
def test_a_broken_line_is_noticed(battery, tmp_path, as_they_are, record_property, file, name):
    before, after = BROKEN[file][name]
    text = (compiler.folder() / file).read_text()
    assert text.count(before) == 1 and as_they_are == [None, None]
    (tmp_path / file).write_text(text.replace(before, after))
    how = noticed(battery, tmp_path, file, tmp_path / file)
    assert how is not None
    record_property("figures", how)
