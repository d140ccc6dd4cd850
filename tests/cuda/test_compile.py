"""Every kernel compiles for every architecture (without --full: for one of them, by turns), by the code that compiles
it on a machine with a GPU. NVRTC needs neither a GPU nor a driver. What compiles is not thereby shown to run."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from c10d_custom import dtypes
from c10d_custom.errors import TransportError, UsageError
from c10d_custom.transport.cuda import compiler
from host_kernels import PAIRS, distinct, instances

pytestmark = [pytest.mark.lane2, pytest.mark.timeout(900)]  # compilers, beside all else that runs

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC's binding comes with the extra 'test'")

FLOAT, SUM = next(p for p in PAIRS if p[0].name == "float32" and dtypes.REDUCE_OPS[p[1]] == "SUM")


def check(unit):
    """What is wrong with the code of some instances for a capability."""
    instances, capability = unit
    code = compiler.compile_text(compiler.text_of(instances), capability)
    wrong = [] if code.startswith(b"\x7fELF") else ["no machine code"]
    return wrong + [name for name in (compiler.name_of(*i) for i in instances) if name.encode() not in code]


CAPABILITIES = ["75", "80", "90", "100", "120"]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles(library, capability, full):
    """Pairs whose C++ type is the same are one instance. Without --full, each for one of the architectures; of the p2p
    kernels then one of each dtype: what is theirs in them is the signals, which have no type."""
    pairs = distinct(library, PAIRS)
    p2p = pairs if full else list({d.name: (d, op) for d, op in pairs}.values())
    turn, turns = (0, 1) if full else (CAPABILITIES.index(capability), len(CAPABILITIES))
    units = [
        ([(algorithm, *p) for p in some[turn::turns][i : i + 30]], capability)
        for algorithm, some in [
            ("Reduce", pairs),
            *((a, p2p) for a in ("Flagged", "OneShot", "TwoShot", "ReduceScatter")),
        ]
        for i in range(0, len(some[turn::turns]), 30)
    ]
    units.append((instances(["AllGather", "Broadcast"], []), capability))
    with ThreadPoolExecutor(2) as pool:
        wrong = list(zip(units, pool.map(check, units)))
    assert [(u, w) for u, w in wrong if w] == []


def test_a_gpu_newer_than_nvrtc_gets_ptx():
    code = compiler.compile_text(compiler.text_of([("Reduce", FLOAT, SUM)]), "990")
    assert b".target sm_" in code and b"c10d_Reduce_float32_SUM" in code


def test_options_keep_the_bits():
    """No fused multiply-add, subnormals, IEEE division: seen in what NVRTC makes of them."""
    pairs = {f"{d.name} {dtypes.REDUCE_OPS[op]}": (d, op) for d, op in PAIRS}
    wanted = ["complex64 PRODUCT", "float32 PREMUL_SUM", "float8_e4m3fn AVG", "float64 AVG"]
    code = compiler.compile_text(compiler.text_of([("Reduce", *pairs[w]) for w in wanted]), "990").decode()
    assert "mul.f32" in code.replace(".rn", "") and "div.rn.f32" in code and "div.rn.f64" in code
    assert "fma." not in code and ".ftz" not in code and ".approx" not in code


def test_what_does_not_compile_says_why():
    with pytest.raises(TransportError, match=r"did not compile for sm_90(.|\n)*nonsense"):
        compiler.compile_text("nonsense", "90")
    with pytest.raises(UsageError, match="BAND has no meaning"):
        compiler.text_of([("Reduce", FLOAT, int(dtypes.RedOp.BAND))])


def test_compiled_code_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    text = compiler.text_of([("Reduce", FLOAT, SUM)])
    code = compiler.compiled(text, "80")
    (file,) = (tmp_path / "cache").iterdir()
    assert file.read_bytes() == code
    monkeypatch.setattr(compiler, "compile_text", lambda *_: b"anew")
    assert compiler.compiled(text, "80") == code
    assert compiler.compiled(text, "90") == b"anew" == compiler.compiled(text + "\n", "80")
    monkeypatch.setenv("CUPY_CACHE_DIR", "/proc/nowhere")
    assert compiler.compiled(text, "80") == b"anew"
